"""The page pool: bounded, never torn between two takers, and nobody starves whom somebody waits for."""

import random
import threading
import time
from collections.abc import Callable

import pytest

from headwater.core.errors import InvalidInput
from headwater.storage.base import Deadline
from headwater.testing.stores import past, soon
from headwater.transfer.executor.pages import Account, PagePool


def pool(num_pages: int, *stores: str) -> PagePool:
    return PagePool(num_pages, stores or ("a",), threading.Condition())


def take(
    pages: PagePool,
    account: Account,
    number: int,
    deadline: Deadline | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[int]:
    return pages.take(account, number, deadline=deadline or soon(), stopped=stopped)


def test_a_slice_is_what_there_is_and_never_more_than_was_asked_for() -> None:
    pages = pool(8)
    first = take(pages, ("a", True), 5)
    second = take(pages, ("a", True), 5)
    assert len(first) == 5
    assert 0 < len(second) <= 3
    assert not set(first) & set(second)
    pages.give_back(("a", True), first)
    pages.give_back(("a", True), second)
    assert pages.num_held == 0


def test_who_waits_too_long_or_is_stopped_gets_nothing() -> None:
    pages = pool(1)
    assert take(pages, ("a", True), 1, past()) == []
    assert take(pages, ("a", True), 1, stopped=lambda: True) == []
    held = take(pages, ("a", True), 1)
    assert take(pages, ("a", True), 1, Deadline.after(0.01)) == []
    pages.give_back(("a", True), held)
    assert take(pages, ("a", True), 1) == held


def test_what_can_be_had_now_is_taken_and_nobody_is_overtaken() -> None:
    pages = pool(8)
    first = pages.take_now(("a", True), 7)
    assert len(first) == 7
    assert pages.take_now(("a", True), 5) == []  # the last is kept for others
    pages.give_back(("a", True), first)
    all_but_floor = take(pages, ("a", False), 8)
    assert pages.take_now(("a", False), 1) == []
    got: list[list[int]] = []
    waiting = threading.Thread(target=lambda: got.append(take(pages, ("a", False), 2)))
    waiting.start()
    while not pages._waiters:
        time.sleep(0.001)
    with pages._changed:  # a page comes back, and who waits has not woken yet
        pages.give_back(("a", False), all_but_floor[:1])
        assert pages.take_now(("a", False), 1) == []
    waiting.join()
    assert got == [all_but_floor[:1]]
    pages.give_back(("a", False), [*all_but_floor[1:], *got[0]])
    assert pages.num_held == 0


@pytest.mark.parametrize("num_pages", [2, 3, 8, 64, 200])
@pytest.mark.parametrize("num_stores", [1, 2, 3])
def test_every_account_can_be_had_by_one_and_loads_of_the_others_go_on(num_pages: int, num_stores: int) -> None:
    stores = [f"store {i}" for i in range(num_stores)]
    for greedy in ((store, hurried) for store in stores for hurried in (True, False)):
        pages = pool(num_pages, *stores)
        taken = take(pages, greedy, num_pages)
        assert len(taken) >= num_pages / 4, "floors leave too little to share"
        if num_pages < 2 * num_stores:
            continue
        for store in stores:
            if (store, True) != greedy:
                assert take(pages, (store, True), 1), f"{greedy} starves loads from {store}"
            if (store, False) != greedy and num_pages >= 4 * num_stores:
                assert take(pages, (store, False), 1), f"{greedy} starves saves to {store}"


def test_loads_come_before_saves_and_then_who_came_first() -> None:
    pages = pool(1)
    held = take(pages, ("a", False), 1)
    order: list[str] = []
    threads = []
    for name, hurried in (("save", False), ("load", True), ("other save", False), ("other load", True)):

        def wait(name: str = name, account: Account = ("a", hurried)) -> None:
            got = take(pages, account, 1)
            order.append(name)
            pages.give_back(account, got)

        threads.append(threading.Thread(target=wait))
        threads[-1].start()
        while len(pages._waiters) < len(threads):
            pass
    pages.give_back(("a", False), held)
    for thread in threads:
        thread.join()
    assert order == ["load", "other load", "save", "other save"]


def test_who_stood_behind_is_told_when_something_is_left() -> None:
    pages = pool(8)
    held = [take(pages, account, 8) for account in (("a", False), ("a", True))]
    got: list[list[int]] = []
    threads = []
    for account in (("a", False), ("a", True)):  # the second goes first, and leaves enough
        threads.append(threading.Thread(target=lambda account=account: got.append(take(pages, account, 1))))
        threads[-1].start()
        while len(pages._waiters) < len(threads):
            pass
    pages.give_back(("a", False), held[0])
    for thread in threads:
        thread.join(10)
    assert [len(one) for one in got] == [1, 1]


def test_no_two_hold_one_page_and_nobody_is_forgotten() -> None:
    pages = pool(6, "a", "b")
    owners = [0] * 6
    torn: list[int] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(100):
            account = (chance.choice("ab"), chance.random() < 0.5)
            got = take(pages, account, chance.randrange(1, 7))
            for page in got:
                owners[page] += 1
            torn.extend(page for page in got if owners[page] != 1)
            for page in got:
                owners[page] -= 1
            pages.give_back(account, got)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not torn
    assert pages.num_held == 0


def test_a_pool_needs_pages() -> None:
    with pytest.raises(InvalidInput):
        pool(0)
