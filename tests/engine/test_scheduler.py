"""The scheduler on slots that only count: who computes what, who gives way, and that everybody comes to an end."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.engine.request import Request, RequestPhase, Sampling
from headwater.engine.scheduler import QueueFull, Scheduler, Work

BLOCK = 4


class Room:
    """So many blocks.

    A request finds what `cached` says, loads while it is in `loading`, may compute behind that in `first_layer`, and
    waits while in `silent`.
    """

    def __init__(self, num_blocks: int = 1000) -> None:
        self.num_blocks = num_blocks
        self.held: dict[Request, int] = {}
        self.asked: list[Request] = []
        self.cached: dict[Request, int] = {}
        self.loading: set[Request] = set()
        self.first_layer: set[Request] = set()
        self.silent: set[Request] = set()
        self.reaches: dict[Request, int] = {}  # up to which token a request that meets may compute
        self.hanging: set[Request] = set()

    def ask(self, request: Request, now_s: float) -> None:
        self.asked.append(request)

    def may_start(self, request: Request, now_s: float) -> bool:
        return request not in self.silent

    def admit(self, request: Request) -> bool:
        assert request not in self.held, "it has slots"
        self.held[request] = 0
        if not self.grow(request, len(request.tokens) + 1):
            del self.held[request]
            return False
        request.phase = RequestPhase.LOADING
        return True

    def loaded(self, request: Request) -> bool:
        if request in self.loading:
            return False
        request.num_computed = min(self.cached.get(request, 0), len(request.tokens) - 1)
        return True

    def stuck(self, request: Request) -> bool:
        return request in self.hanging

    def reach(self, request: Request, num_tokens: int) -> int:
        return min(self.reaches[request], len(request.tokens), request.num_computed + num_tokens)

    def coming(self, request: Request) -> bool:
        if request not in self.first_layer:
            return False
        request.num_computed = min(self.cached.get(request, 0), len(request.tokens) - 1)
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        more = max(0, -(-num_tokens // BLOCK) - self.held[request])
        if more > self.num_blocks - sum(self.held.values()):
            return False
        self.held[request] += more
        return True

    def release(self, request: Request) -> None:
        self.held.pop(request, None)
        request.num_computed = 0


def ask(num_prompt: int, num_answer: int = 4, name: str = "") -> Request:
    sampling = Sampling(max_tokens=num_answer)
    return Request(name=name, prompt=[1] * num_prompt, sampling=sampling, listen=lambda output: None)


def scheduler(room: Room, *requests: Request, running: int = 8, waiting: int = 8, tokens: int = 8) -> Scheduler:
    made = Scheduler(room, max_running=running, max_waiting=waiting, step_tokens=tokens)
    for request in requests:
        made.add(request, 0.0)
    return made


def compute(made: Scheduler, room: Room, work: Sequence[Work]) -> None:
    """What an engine does with a plan."""
    for one in work:
        samples = one.samples
        one.request.num_computed = one.end
        if one.early:
            room.loading.discard(one.request)
            one.request.phase = RequestPhase.RUNNING
        if samples:
            one.request.tokens.append(2)
            if one.request.num_generated >= one.request.sampling.max_tokens:
                room.release(one.request)
                made.remove(one.request)


def step(made: Scheduler, room: Room) -> list[tuple[Request, int, int]]:
    work = made.plan(0.0)
    compute(made, room, work)
    return [(one.request, one.start, one.end) for one in work]


def generating(made: Scheduler, room: Room, *requests: Request) -> None:
    """Until they all are."""
    for _ in range(20):
        if all(request.generating for request in requests):
            return
        step(made, room)
    pytest.fail("they do not get there")


# --- who computes what ------------------------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_and_then_token_by_token() -> None:
    room, request = Room(), ask(19, 3)
    made = scheduler(room, request)
    assert [step(made, room) for _ in range(5)] == [
        [(request, 0, 8)],
        [(request, 8, 16)],
        [(request, 16, 19)],  # samples the first token
        [(request, 19, 20)],
        [(request, 20, 21)],
    ]
    assert (made.idle, request.phase, request.num_generated) == (True, RequestPhase.OVER, 3)


def test_only_the_last_chunk_samples() -> None:
    room, request = Room(), ask(9)
    made = scheduler(room, request)
    (first,) = made.plan(0.0)
    assert not first.samples
    compute(made, room, [first])
    (second,) = made.plan(0.0)
    assert second.samples


def test_what_is_cached_is_not_computed() -> None:
    room, request = Room(), ask(12)
    room.cached[request] = 8
    made = scheduler(room, request)
    assert step(made, room) == [(request, 8, 12)]


def test_who_generates_comes_first_and_prompts_share_the_rest_oldest_first() -> None:
    room = Room()
    old = [ask(3), ask(3)]
    made = scheduler(room, *old)
    generating(made, room, *old)
    first, second, third = ask(4), ask(30), ask(30)
    for request in (first, second, third):
        made.add(request, 0.0)
    assert step(made, room) == [(old[0], 3, 4), (old[1], 3, 4), (first, 0, 4), (second, 0, 2)]
    assert step(made, room)[2:] == [(first, 4, 5), (second, 2, 7)]


def test_more_generate_than_the_budget_has_tokens() -> None:
    room = Room()
    requests = [ask(1, 9) for _ in range(5)]
    for request in requests:  # they were here before
        request.tokens.append(2)
        room.cached[request] = 1
    made = scheduler(room, *requests, ask(1), tokens=2)
    assert [request for request, _, _ in step(made, room)] == requests  # all of them, and no prompt


def test_no_more_run_than_may_and_the_rest_in_order() -> None:
    room = Room()
    requests = [ask(1, 1) for _ in range(5)]
    made = scheduler(room, *requests, running=2)
    assert [[request for request, _, _ in step(made, room)] for _ in range(3)] == [
        requests[:2],
        requests[2:4],
        requests[4:],
    ]


def test_one_that_loads_computes_nothing_and_holds_up_nobody() -> None:
    room = Room()
    loads, computes = ask(3), ask(3)
    room.loading.add(loads)
    made = scheduler(room, loads, computes)
    assert step(made, room) == [(computes, 0, 3)]
    room.loading.clear()
    room.cached[loads] = 2
    assert (loads, 2, 3) in step(made, room)


def test_one_that_loads_computes_behind_its_bytes_if_nobody_else_has_work() -> None:
    room = Room()
    loads, other, computes = ask(30), ask(3), ask(2, 2)
    room.loading |= {loads, other}
    room.cached[loads] = 20
    made = scheduler(room, loads, other, computes)
    room.first_layer |= {loads, other}
    assert step(made, room) == [(computes, 0, 2)]
    assert step(made, room) == [(computes, 2, 3)]
    (early,) = made.plan(0.0)  # alone: others would wait with it
    assert early == Work(loads, 20, 28, early=True)
    compute(made, room, [early])
    assert step(made, room) == [(loads, 28, 30)]
    assert not made.plan(0.0)[0].early
    assert other.phase is RequestPhase.LOADING


def test_one_that_computed_for_nothing_goes_on_with_what_came() -> None:
    room, request = Room(), ask(7)
    room.loading.add(request)
    room.cached[request] = 4
    made = scheduler(room, request)
    assert step(made, room) == []
    room.first_layer.add(request)
    assert made.plan(0.0) == [Work(request, 4, 7, early=True)]  # and then a block does not come
    assert request.phase is RequestPhase.LOADING
    room.loading.clear()
    room.cached[request] = 0
    assert step(made, room) == [(request, 0, 7)]


@pytest.mark.parametrize("why", ["silent", "no room"])
def test_nobody_overtakes_the_head_of_the_queue(why: str) -> None:
    room = Room(num_blocks=4)
    runs, head, small = ask(7), ask(11), ask(1)
    made = scheduler(room, runs)
    step(made, room)
    if why == "silent":
        room.silent.add(head)
        room.num_blocks = 100
    made.add(head, 0.0)
    made.add(small, 0.0)
    step(made, room)
    assert list(made.waiting) == [head, small]
    room.silent.clear()
    room.num_blocks = 100
    step(made, room)
    assert made.running == [runs, head, small]


# --- who gives way ----------------------------------------------------------------------------------------------------


def test_the_youngest_gives_way_and_is_the_next_to_come_back() -> None:
    room = Room(num_blocks=6)
    requests = [ask(3, 9) for _ in range(3)]
    later = ask(1)
    made = scheduler(room, *requests, tokens=9)
    generating(made, room, *requests)  # one block each, full
    step(made, room)  # each takes a second
    assert sum(room.held.values()) == 6
    made.add(later, 0.0)
    for _ in range(3):
        step(made, room)
    work = step(made, room)  # the oldest needs a third
    old, middle, young = requests
    assert [request for request, _, _ in work] == [old, middle]
    assert list(made.waiting) == [young, later]
    assert (young.phase, young.preemptions, young.num_computed) == (RequestPhase.WAITING, 1, 0)
    assert young not in room.held
    assert (old.preemptions, middle.preemptions) == (0, 0)
    assert young.num_generated == 5  # what it has said it keeps


def test_several_that_gave_way_come_back_oldest_first() -> None:
    room = Room(num_blocks=9)
    requests = [ask(3, 12) for _ in range(4)]
    made = scheduler(room, *requests)
    generating(made, room, *requests)
    room.num_blocks = 2
    step(made, room)
    assert made.running == requests[:1]
    assert list(made.waiting) == requests[1:]
    room.num_blocks = 100
    step(made, room)
    assert made.running == requests
    assert not made.waiting


def test_one_that_loads_gives_way_too() -> None:
    room = Room(num_blocks=3)
    old, loads = ask(3), ask(3)
    made = scheduler(room, old)
    generating(made, room, old)
    room.loading.add(loads)
    made.add(loads, 0.0)
    room.num_blocks = 2
    work = step(made, room)
    assert work == [(old, 3, 4)]
    assert (loads.phase, loads in room.held) == (RequestPhase.WAITING, False)


def test_with_nobody_younger_it_gives_way_itself() -> None:
    room = Room(num_blocks=1)
    request = ask(3)
    made = scheduler(room, request)
    step(made, room)
    assert step(made, room) == []  # blocks that somebody else still holds, say
    assert (list(made.waiting), made.running, request.preemptions) == ([request], [], 1)
    room.num_blocks = 2
    assert step(made, room) == [(request, 0, 4)]
    assert request.num_generated == 2


@pytest.mark.parametrize("at", [0, 2, 3, 5])
def test_one_that_is_told_to_gives_way_once(at: int) -> None:
    room = Room()
    request, other = ask(3), ask(3)
    request.preempt_at = at
    made = scheduler(room, request, other)
    while not request.preemptions:
        before = request.num_computed
        step(made, room)
    assert before == max(at, 3 if at else 0)  # a prompt is one step here
    while not made.idle:
        step(made, room)
    assert (request.preemptions, request.num_generated) == (1, 4)
    assert (other.preemptions, other.num_generated) == (0, 4)


def test_one_that_is_told_to_and_has_to_gives_way_once() -> None:
    """It was told to at once, and an older one needed its room in the same plan."""
    room = Room(num_blocks=3)
    old, told = ask(3), ask(3)
    made = scheduler(room, old)
    generating(made, room, old)
    told.preempt_at = 0
    made.add(told, 0.0)
    room.num_blocks = 2
    assert step(made, room) == [(old, 3, 4)]
    assert (list(made.waiting), told.preemptions) == ([told], 1)


# --- in and out -------------------------------------------------------------------------------------------------------


def test_the_queue_is_bounded() -> None:
    room = Room(num_blocks=4)
    requests = [ask(3), ask(7)]
    made = scheduler(room, *requests, waiting=2)
    refused = ask(1)
    with pytest.raises(QueueFull):
        made.add(refused, 0.0)
    assert room.asked == requests
    assert refused not in made.waiting
    generating(made, room, *requests)
    made.add(ask(1), 0.0)
    made.add(ask(1), 0.0)
    room.num_blocks = 2
    step(made, room)  # the queue is full, and who gives way comes in all the same
    assert (made.waiting[0], len(made.waiting)) == (requests[1], 3)
    with pytest.raises(QueueFull):
        made.add(ask(1), 0.0)


def test_one_that_is_over_is_nowhere() -> None:
    room = Room()
    runs, waits = ask(3), ask(3)
    made = scheduler(room, runs, waits, running=1)
    step(made, room)
    for request in (waits, runs):
        assert not made.idle
        room.release(request)
        made.remove(request)
        made.remove(request)  # whoever is second changes nothing
        assert request.phase is RequestPhase.OVER
        assert request not in [*made.running, *made.waiting]
    assert made.idle
    assert made.plan(0.0) == []


@st.composite
def crowds(draw: st.DrawFn) -> list[tuple[int, int, int | None, int]]:
    """Requests: tokens of the prompt and of the answer, when it is told to give way, how many are cached."""
    one = st.tuples(st.integers(1, 14), st.integers(1, 8), st.none() | st.integers(0, 16), st.integers(0, 14))
    return draw(st.lists(one, min_size=1, max_size=8))


@given(crowds(), st.integers(6, 20), st.integers(1, 4), st.integers(1, 12), st.randoms(use_true_random=False))
def test_everybody_comes_to_an_end_whatever_happens(
    crowd: list[tuple[int, int, int | None, int]], num_blocks: int, running: int, tokens: int, chance: Random
) -> None:
    room = Room(num_blocks)
    made = Scheduler(room, max_running=running, max_waiting=len(crowd), step_tokens=tokens)
    coming = []
    for number, (num_prompt, num_answer, preempt_at, cached) in enumerate(crowd):
        request = ask(num_prompt, num_answer, f"{number}")
        request.preempt_at = preempt_at
        room.cached[request] = cached
        coming.append(request)
    everybody, gone, admitted = list(coming), set[Request](), list[Request]()
    for turn in range(2000):
        if coming and chance.random() < 0.3:
            made.add(coming.pop(0), 0.0)
        here = [*made.running, *made.waiting]
        if here and turn < 100 and chance.random() < 0.02:
            gone.add(left := chance.choice(here))
            room.release(left)
            made.remove(left)
        if turn < 100:
            room.loading = {request for request in made.running if chance.random() < 0.2}
            room.silent = {request for request in made.waiting if chance.random() < 0.2}
            room.first_layer = {request for request in made.running if chance.random() < 0.5}
        else:
            room.loading, room.silent = set(), set()
        work = made.plan(0.0)
        check_plan(made, room, work, tokens, running)
        admitted += [request for request in made.running if request not in admitted]
        if work and work[0].early and chance.random() < 0.3:
            room.cached[work[0].request] = 0  # it did not come: nothing was computed
        else:
            compute(made, room, work)
        if not coming and made.idle:
            break
    assert made.idle, "somebody waits for ever"
    assert not room.held
    assert [request for request in admitted if not request.preemptions] == [
        request for request in everybody if request in admitted and not request.preemptions
    ]  # in the order they came
    for request in everybody:
        assert request.phase is RequestPhase.OVER
        assert request in gone or request.num_generated == request.sampling.max_tokens


def check_plan(made: Scheduler, room: Room, work: list[Work], tokens: int, running: int) -> None:
    """What holds of every plan."""
    assert len(made.running) <= running
    assert not set(made.running) & set(made.waiting)
    assert len({one.request for one in work}) == len(work)
    assert set(room.held) == set(made.running)
    assert all(request.phase is RequestPhase.WAITING for request in made.waiting)
    ends = {one.request: one.end for one in work}
    for one in work:
        assert one.request.phase is (RequestPhase.LOADING if one.early else RequestPhase.RUNNING)
        assert len(work) == 1 or not one.early
        assert one.start == one.request.num_computed < one.end <= len(one.request.tokens)
        assert one.end <= room.held[one.request] * BLOCK
    able = [request for request in made.running if request.phase is RequestPhase.RUNNING]
    talkers = [request for request in able if request.generating]
    readers = [request for request in able if not request.generating]
    assert all(request in ends for request in talkers)
    assert sum(one.end - one.start for one in work) <= max(tokens, len(talkers))
    cut = [request for request in readers if ends.get(request, 0) < len(request.tokens)]
    if cut:  # the budget is used up, by those before the first that got less than it wants
        assert sum(one.end - one.start for one in work) >= tokens
        assert not [request for request in cut[1:] if request in ends]


# --- several answers to one prompt ------------------------------------------------------------------------------------


def test_who_comes_after_another_is_passed_over_until_that_one_has_computed_their_prompt() -> None:
    room, first, other = Room(), ask(20), ask(3)
    after = [ask(20) for _ in range(2)]
    for one in after:
        one.after = first
    made = scheduler(room, first, *after, other)
    assert room.asked == [first, other]  # nothing is looked up for those that wait
    while first.num_generated == 0:
        work = made.plan(0.0)
        assert not {one.request for one in work} & {*after}
        compute(made, room, work)
    assert other.num_generated > 0  # it came behind them, and did not wait
    first.first_token_s = 1.0
    made.plan(0.0)
    assert {*after} <= {*made.running}
    assert not made.waiting


@pytest.mark.parametrize("how", ["over", "preempted"])
def test_who_comes_after_one_that_is_over_does_not_wait_for_it(how: str) -> None:
    room, first, second = Room(), ask(20), ask(20)
    second.after = first
    made = scheduler(room, first, second)
    step(made, room)
    assert second.waits
    if how == "over":
        room.release(first)
        made.remove(first)
    else:  # it comes back, and computes its prompt again
        first.preempt_at = 0
        step(made, room)
        assert first.preemptions == 1
        assert second.waits
        generating(made, room, first)
        first.first_token_s = 1.0
    step(made, room)
    assert second in made.running


# --- who was submitted together ---------------------------------------------------------------------------------------


def submit(made: Scheduler, number: int, name: str) -> list[Request]:
    """Requests that take turns with others."""
    requests = [ask(1, 1, f"{name}{turn}") for turn in range(number)]
    for turn, request in enumerate(requests):
        made.add(request, 0.0, turn=turn)
    return requests


@pytest.mark.fault("S7")
def test_submissions_take_turns_and_nobody_is_behind_all_of_another() -> None:
    room = Room()
    made = scheduler(room, running=2, waiting=100)
    many = submit(made, 50, "many")
    assert [request for request, _, _ in step(made, room)] == many[:2]
    (one,), few = submit(made, 1, "one"), submit(made, 4, "few")
    order = [request for _ in range(6) for request, _, _ in step(made, room)]
    assert order == [
        many[2], one, few[0], many[3], few[1], many[4], few[2], many[5], few[3], many[6], many[7], many[8],
    ]  # fmt: skip


@pytest.mark.fault("S7")
def test_a_stream_of_newcomers_keeps_nobody_of_a_large_submission_out_for_ever() -> None:
    room = Room()
    made = scheduler(room, running=1, waiting=100)
    many = submit(made, 10, "many")
    done: list[Request] = []
    for turn in range(80):
        submit(made, 1, f"new{turn}-")
        done += [request for request, _, _ in step(made, room)]
    assert set(many) <= set(done)  # one in each round, however many others are in it


# --- what lies behind is being loaded ---------------------------------------------------------------------------------


def test_who_meets_computes_as_far_as_it_may_and_others_have_the_rest() -> None:
    room, first, second = Room(), ask(20), ask(20)
    made = scheduler(room, first, second)
    room.reaches[first] = 4
    assert step(made, room) == [(first, 0, 8)]
    first.num_computed, first.meets = 0, True
    assert step(made, room) == [(first, 0, 4), (second, 0, 4)]
    assert step(made, room) == [(second, 4, 12)], "it stands before what is on its way"
    first.num_computed, first.meets = 16, False  # that has come
    assert step(made, room) == [(first, 16, 20), (second, 12, 16)]


def test_who_meets_asks_before_its_last_token_too() -> None:
    """One that comes back, and has all but its newest token: the block of that one may be on its way."""
    room, request = Room(), ask(8)
    made = scheduler(room, request)
    generating(made, room, request)
    request.meets, room.reaches[request] = True, request.num_computed
    assert step(made, room) == []
    room.reaches[request] = 100
    assert step(made, room) == [(request, 8, 9)]


def test_who_comes_to_a_row_that_hangs_begins_anew_and_computes_all() -> None:
    room, request = Room(), ask(20)
    made = scheduler(room, request)
    step(made, room)
    request.meets, room.reaches[request] = True, 12
    room.hanging.add(request)
    assert step(made, room) == [(request, 8, 12)], "it has not come there yet"
    assert step(made, room) == []
    assert (request.phase, request.computes_all, request.preemptions) == (RequestPhase.WAITING, True, 1)
    assert request not in room.held
