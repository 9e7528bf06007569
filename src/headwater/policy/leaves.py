"""Who builds on whom, and which leaf leaves first: the order in which a prefix cache may forget.

Pure counting over hashable keys, for stores (the device has `index/free_leaves.py`). A block that others build on is
never a victim; when the last of them goes, it becomes a leaf and takes its place in the order at once, so a cold
sequence goes from its end.
Blocks of different `group`s (page sizes, say) never make room for each other and are ordered apart.

A parent need not be known: its children are remembered, and it has them when it comes. Every operation costs O(log n)
amortised: the heap keeps stale entries until they surface, and is rebuilt when they outnumber the true ones.
"""

import heapq
from collections.abc import Collection, Container, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class LeafOrder(Generic[K]):
    """Known blocks as a forest, with its leaves in the order of their priority."""

    def __init__(self) -> None:
        self._nodes: dict[K, tuple[K, float, int]] = {}  # parent, priority, group
        # Children of each parent, also of parents that are not known. Most have one, and a set for it would cost more
        # than all the rest.
        self._children: dict[K, K | set[K]] = {}
        self._heaps: dict[int, list[tuple[float, int, K]]] = {}
        self._tick = 0  # breaks ties by age, so that keys are never compared

    @classmethod
    def of(cls, blocks: Iterable[tuple[K, K, float, int]]) -> "LeafOrder[K]":
        """All blocks at once, as (key, parent, priority, group), each key once: much faster than one by one."""
        order = cls()
        order.extend(blocks)
        order.settle()
        return order

    def extend(self, blocks: Iterable[tuple[K, K, float, int]]) -> None:
        """More blocks, none of them known; `settle` before anything is asked."""
        nodes, adopt = self._nodes, self._adopt
        for key, parent, priority, group in blocks:
            nodes[key] = (parent, priority, group)
            adopt(parent, key)

    def settle(self) -> None:
        """Order what `extend` brought."""
        for group in {node[2] for node in self._nodes.values()}:
            self._rebuild(group)

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
        self._nodes[key] = (parent, priority, group)
        self._adopt(parent, key)
        self._push(key)

    def add_all(self, blocks: Iterable[tuple[K, K, float, int]]) -> None:
        """`add` of many, as (key, parent, priority, group): a row costs one place in the order, and not one a block."""
        nodes, children, adopt = self._nodes, self._children, self._adopt
        fresh: list[K] = []
        for key, parent, priority, group in blocks:
            if key in nodes:
                self.remove(key)
            nodes[key] = (parent, priority, group)
            adopt(parent, key)
            fresh.append(key)
        for key in fresh:
            if key not in children:
                self._push(key)

    def remove(self, key: K) -> None:
        """A block is gone. What builds on it stays known; see `subtree`."""
        node = self._nodes.pop(key, None)
        if node is None:
            return
        parent = node[0]
        siblings = self._children[parent]
        if isinstance(siblings, set) and len(siblings) > 1:
            siblings.remove(key)
        else:
            del self._children[parent]
            self._push(parent)

    def touch(self, key: K, priority: float) -> None:
        """A block's priority changed. Unknown ones are passed over."""
        node = self._nodes.get(key)
        if node is not None and node[1] != priority:
            self._nodes[key] = (node[0], priority, node[2])
            self._push(key)

    def priority(self, key: K) -> float:
        """The priority of a known block."""
        return self._nodes[key][1]

    def is_leaf(self, key: K) -> bool:
        """Whether a known block has nothing that builds on it."""
        return key in self._nodes and key not in self._children

    def has_children(self, key: K) -> bool:
        """Whether something builds on a block, known or not."""
        return key in self._children

    def subtree(self, key: K) -> Iterator[K]:
        """A known block and all that builds on it, itself first. The forest must not change meanwhile."""
        stack = [key] if key in self._nodes else []
        seen = set(stack)  # a damaged index may say that a block builds on itself
        while stack:
            found = stack.pop()
            yield found
            more = [child for child in self._of(found) if child not in seen]
            seen.update(more)
            stack.extend(more)

    def leaves_first(self, keys: Iterable[K]) -> Iterator[K]:
        """Known blocks and all that builds on them, each after all that builds on it.

        The forest may change between two of them: what was given may be removed, and what comes to build on one that
        was not given yet is given before it.
        """
        given: set[K] = set()
        opened: set[K] = set()  # a damaged index may say that a block builds on itself
        for key in keys:
            stack = [key]
            while stack:
                top = stack[-1]
                more = [child for child in self._of(top) if child not in given and child not in opened]
                if top in given or top not in self._nodes:
                    stack.pop()
                elif more:
                    opened.add(top)
                    stack.extend(more)
                else:
                    stack.pop()
                    given.add(top)
                    yield top

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
            found = (key, self._nodes[key][0], entry[0])
            self.remove(key)
            break
        for entry in spared:
            heapq.heappush(self._heaps[group], entry)
        return found

    def validate(self) -> None:
        """Raise AssertionError if the forest contradicts itself. For tests; reads everything."""
        for key, (parent, priority, group) in self._nodes.items():
            assert key in self._of(parent)  # noqa: S101
            if self.is_leaf(key):
                assert any(entry[0] == priority and entry[2] == key for entry in self._heaps[group])  # noqa: S101
        for parent in self._children:
            children = self._of(parent)
            assert children  # noqa: S101
            assert all(self._nodes[child][0] == parent for child in children)  # noqa: S101

    def _of(self, parent: K) -> Collection[K]:
        children = self._children.get(parent)
        if children is None:
            return ()
        return children if isinstance(children, set) else (children,)

    def _adopt(self, parent: K, key: K) -> None:
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = key
        elif isinstance(siblings, set):
            siblings.add(key)
        else:
            self._children[parent] = {siblings, key}

    def _push(self, key: K) -> None:
        node = self._nodes.get(key)
        if node is None or key in self._children:
            return
        heap = self._heaps.setdefault(node[2], [])
        self._tick += 1
        heapq.heappush(heap, (node[1], self._tick, key))
        if len(heap) > 2 * len(self._nodes) + 64:
            self._rebuild(node[2])

    def _rebuild(self, group: int) -> None:
        """A heap of true entries alone."""
        children = self._children
        leaves = [(node[1], key) for key, node in self._nodes.items() if node[2] == group and key not in children]
        self._tick += len(leaves)
        heap = [(priority, i - len(leaves), key) for i, (priority, key) in enumerate(leaves, self._tick)]
        heapq.heapify(heap)
        self._heaps[group] = heap

    def _settled(self, group: int) -> list[tuple[float, int, K]]:
        """The group's heap, with a true entry on top."""
        heap = self._heaps.get(group, [])
        while heap:
            priority, _, key = heap[0]
            node = self._nodes.get(key)
            if node is not None and node[1] == priority and node[2] == group and key not in self._children:
                return heap
            heapq.heappop(heap)
        return heap
