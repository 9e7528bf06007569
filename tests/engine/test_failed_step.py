"""A step that fails when the device was told already: its slots are nobody's before the device has done with them."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine_kit import make_prompt
from headwater.engine.compute import StepComputer
from headwater.engine.make_model import FAMILIES, random_model
from headwater.engine.models.base import Span
from headwater.engine.request import Finish
from test_meet import BLOCK, NUM_BLOCKS, TAIL, assert_same, opened, rig, run_cold

WAIT_S = 60.0


def test_slots_of_a_failed_step_are_given_up_when_the_device_has_done_with_them(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device here is late, as a GPU is: a thread writes to the step's slots when the step has failed already."""
    model = random_model(FAMILIES["llama"], dtype="fp32", block_tokens=BLOCK)
    prompt = make_prompt(model, NUM_BLOCKS * BLOCK + TAIL)
    late: list[threading.Thread] = []
    may_write = threading.Event()

    def wait_for_device(_: StepComputer) -> None:
        may_write.set()
        for one in late:
            one.join(WAIT_S)

    with opened("host", shm, tmp_path) as (name, store):
        cold = run_cold(model, name, store, prompt)
        store.page_s = 0.0
        with rig(model, name, store, meets=False, primed=False) as here:
            assert here.engine.wait_warm(WAIT_S)
            here.engine._scheduler._step_tokens = 2048  # nearly all slots are in one step
            monkeypatch.setattr(StepComputer, "wait_for_device", wait_for_device)

            def fail(spans: Sequence[Span]) -> None:
                slots = [slot for span in spans for slot in span.slots[: -(-len(span.tokens) // BLOCK)]]

                def write() -> None:
                    may_write.wait(2.0)  # by then another's blocks are there, if nobody waited for the device
                    for row in here.planes.rows:
                        row[slots] = 0x55

                here.model.before_step = None
                late.append(threading.Thread(target=write))
                late[0].start()
                raise RuntimeError("out of memory in a later layer")

            here.model.before_step = fail
            failed = here.begin(make_prompt(model, 55 * BLOCK, seed=9))
            assert failed.over.wait(WAIT_S)
            assert failed.finish is Finish.FAILED
            run = here.ask(prompt)
            assert run.usage is not None
            assert run.usage.cached_by_tier == {name: NUM_BLOCKS * BLOCK}
            for one in late:
                one.join(WAIT_S)
            assert_same(here.ask(prompt), cold)
