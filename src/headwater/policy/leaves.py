"""Who builds on whom, and which leaf leaves first: the order in which a prefix cache may forget.

Pure counting over hashable keys, for stores and device slots alike. A block that others build on is never a victim;
when the last of them goes, it becomes a leaf and takes its place in the order at once, so a cold sequence goes from its
end.
Blocks of different `group`s (page sizes, say) never make room for each other and are ordered apart.

A parent need not be known: its children are remembered, and it has them when it comes. Every operation costs O(log n)
amortised: the heap keeps stale entries until they surface, and is rebuilt when they outnumber the true ones.
"""

import heapq
from collections.abc import Container, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class _Node(Generic[K]):
    __slots__ = ("group", "parent", "priority")

    def __init__(self, parent: K, priority: float, group: int) -> None:
        self.parent = parent
        self.priority = priority
        self.group = group


class LeafOrder(Generic[K]):
    """Known blocks as a forest, with its leaves in the order of their priority."""

    def __init__(self) -> None:
        self._nodes: dict[K, _Node[K]] = {}
        self._children: dict[K, set[K]] = {}  # also of parents that are not known
        self._heaps: dict[int, list[tuple[float, int, K]]] = {}
        self._tick = 0  # breaks ties by age, so that keys are never compared

    def __len__(self) -> int:
        """Blocks known."""
        return len(self._nodes)

    def __contains__(self, key: K) -> bool:
        """Whether a block is known."""
        return key in self._nodes

    def add(self, key: K, parent: K, priority: float, *, group: int = 0) -> None:
        """A block is there, built on `parent`. A known one is replaced."""
        if key in self._nodes:
            self.remove(key)
        self._nodes[key] = _Node(parent, priority, group)
        self._children.setdefault(parent, set()).add(key)
        self._push(key)

    def remove(self, key: K) -> None:
        """A block is gone. What builds on it stays known; see `subtree`."""
        node = self._nodes.pop(key, None)
        if node is None:
            return
        siblings = self._children[node.parent]
        siblings.remove(key)
        if not siblings:
            del self._children[node.parent]
            self._push(node.parent)

    def touch(self, key: K, priority: float) -> None:
        """A block's priority changed. Unknown ones are passed over."""
        node = self._nodes.get(key)
        if node is not None and node.priority != priority:
            node.priority = priority
            self._push(key)

    def priority(self, key: K) -> float:
        """The priority of a known block."""
        return self._nodes[key].priority

    def is_leaf(self, key: K) -> bool:
        """Whether a known block has nothing that builds on it."""
        return key in self._nodes and key not in self._children

    def subtree(self, key: K) -> Iterator[K]:
        """A known block and all that builds on it, itself first. The forest must not change meanwhile."""
        stack = [key] if key in self._nodes else []
        while stack:
            found = stack.pop()
            yield found
            stack.extend(self._children.get(found, ()))

    def lowest(self, group: int = 0) -> float | None:
        """Priority of the next victim; None where there is none."""
        heap = self._settled(group)
        return heap[0][0] if heap else None

    def pop(self, group: int = 0, spare: Container[K] = ()) -> tuple[K, K, float] | None:
        """Remove the leaf with the lowest priority that is not in `spare`: (key, parent, priority), or None."""
        spared = []
        found = None
        while heap := self._settled(group):
            entry = heapq.heappop(heap)
            if entry[2] in spare:
                spared.append(entry)
                continue
            key = entry[2]
            found = (key, self._nodes[key].parent, entry[0])
            self.remove(key)
            break
        for entry in spared:
            heapq.heappush(self._heaps[group], entry)
        return found

    def validate(self) -> None:
        """Raise AssertionError if the forest contradicts itself. For tests; reads everything."""
        for key, node in self._nodes.items():
            assert key in self._children[node.parent]  # noqa: S101
        for parent, children in self._children.items():
            assert children  # noqa: S101
            assert all(self._nodes[child].parent == parent for child in children)  # noqa: S101
        for key, node in self._nodes.items():
            if self.is_leaf(key):
                assert any(entry[0] == node.priority and entry[2] == key for entry in self._heaps[node.group])  # noqa: S101

    def _push(self, key: K) -> None:
        node = self._nodes.get(key)
        if node is None or key in self._children:
            return
        heap = self._heaps.setdefault(node.group, [])
        self._tick += 1
        heapq.heappush(heap, (node.priority, self._tick, key))
        if len(heap) > 2 * len(self._nodes) + 64:
            self._heaps[node.group] = list(self._leaves(node.group))
            heapq.heapify(self._heaps[node.group])

    def _leaves(self, group: int) -> Iterator[tuple[float, int, K]]:
        for tick, (key, node) in enumerate(self._nodes.items()):
            if node.group == group and key not in self._children:
                yield node.priority, tick - len(self._nodes), key

    def _settled(self, group: int) -> list[tuple[float, int, K]]:
        """The group's heap, with a true entry on top."""
        heap = self._heaps.get(group, [])
        while heap:
            priority, _, key = heap[0]
            node = self._nodes.get(key)
            if node is not None and node.priority == priority and node.group == group and key not in self._children:
                return heap
            heapq.heappop(heap)
        return heap
