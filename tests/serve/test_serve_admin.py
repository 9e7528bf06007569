"""`/admin/purge`, `/admin/drain` and `headwater admin`: blocks that are gone stay gone, and a server that rests."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.engine.models.base import Model
from headwater.index.slots import SlotState
from serve_kit import WAIT_S, Served, directory, model, serving

__all__ = ["directory", "model"]  # fixtures

KEY = "s3cret"
AUTH = {"authorization": f"Bearer {KEY}"}
PREFIX = list(range(1, 97))
PROMPT = [*PREFIX, *range(160, 220)]


@pytest.fixture
def here(directory: Path, model: Model, tmp_path: Path) -> Iterator[Served]:
    """A server with a disk tier that wants a key."""
    with serving(
        directory, model, api_key=KEY, disk_directory=tmp_path / "disk", disk_bytes=16 << 20, num_blocks=64
    ) as one:
        yield one


def num_texts(here: Served) -> int:
    """Requests whose text is still known, for explanations."""
    return sum(one.text is not None for one in here.running.cache.explanations()[1])


def ask(here: Served, prompt: list[int], salt: str | None = None) -> tuple[str, int]:
    """A short answer, and how many of the prompt's tokens were there."""
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 4, "cache_salt": salt}
    found = here.post("/v1/completions", body, headers=AUTH)
    assert found.status_code == 200, found.text
    answer = found.json()
    assert here.running.cache.drain(WAIT_S)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def purge(here: Served, **body: Any) -> dict[str, Any]:
    found = here.post("/admin/purge", body, headers=AUTH)
    assert found.status_code == 200, found.text
    with here.running.cache.still() as brain:
        brain.validate()
        assert brain.purges.open is None
    document: dict[str, Any] = found.json()
    return document


def size(here: Served) -> int:
    return here.running.engine.model.block_tokens


def command(here: Served, *words: str) -> Any:
    return CliRunner().invoke(app, ["admin", *words, "--url", here.url, "--api-key", KEY])


def test_a_prefix_is_gone_from_device_and_disk_with_what_builds_on_it(here: Served) -> None:
    text, _ = ask(here, PROMPT)
    ask(here, [7, *PROMPT])
    _, cached = ask(here, PROMPT)
    assert cached >= len(PROMPT) - size(here) - 1
    num_prefix, num_all = len(PREFIX) // size(here), (len(PROMPT) + 3) // size(here)
    found = purge(here, prompt=PREFIX)
    assert found["from_token"] == (num_prefix - 1) * size(here)
    assert found["removed"]["device"] == num_all - num_prefix + 1
    assert found["removed"]["disk"] == num_all - num_prefix + 1
    assert (found["held"], found["left"], found["unreached"], found["whole"]) == (0, {}, {}, True)
    assert ask(here, PROMPT) == (text, (num_prefix - 1) * size(here)), "the same answer; only what is before it was hit"
    _, cached = ask(here, [7, *PROMPT])
    assert cached > (num_prefix - 1) * size(here), "another prompt's blocks stay"
    _, cached = ask(here, PROMPT)
    assert cached > num_prefix * size(here), "computed again, it is kept again"
    assert here.running.metrics.value("purged_blocks_total", tier="disk") == found["removed"]["disk"]
    again = purge(here, prompt=PREFIX, from_token=0)
    assert again["from_token"] == 0
    assert again["removed"]["device"] >= num_all
    assert ask(here, PROMPT)[1] == 0


def test_a_tenant_is_gone_and_no_other(here: Served) -> None:
    for salt in (None, "one", "two"):
        ask(here, PROMPT, salt)
    assert num_texts(here) == 3
    found = purge(here, cache_salt="one", whole_tenant=True)
    assert num_texts(here) == 2
    assert found["removed"]["device"] == found["removed"]["disk"] == (len(PROMPT) + 3) // size(here)
    assert found["from_token"] is None
    assert [ask(here, PROMPT, salt)[1] > 0 for salt in (None, "one", "two")] == [True, False, True]
    assert purge(here, whole_tenant=True)["removed"]["disk"] > 0
    assert [ask(here, PROMPT, salt)[1] > 0 for salt in (None, "two")] == [False, True]


def test_what_a_running_request_uses_leaves_with_it(here: Served) -> None:
    ask(here, PROMPT)
    with here.openai(KEY) as client:
        stream = client.completions.create(
            model=here.running.name, prompt=PROMPT, temperature=0, max_tokens=400, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        found = purge(here, prompt=PREFIX)
        assert 0 < found["held"] <= found["removed"]["device"]
        assert ask(here, PROMPT)[1] == found["from_token"], "nobody new finds it"
        text = "".join(chunk.choices[0].text for chunk in stream)
        assert text
    here.until_free()
    assert here.running.cache.drain(WAIT_S)
    assert num_texts(here) == 1, "what was barred leaves no text behind; what was asked since does"
    with here.running.cache.still() as brain:
        assert brain.slots.counts()[SlotState.LEAVING] == 0


def test_a_save_under_way_does_not_bring_it_back(here: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    store = here.running.stores["disk"]
    begun, go_on, put = threading.Event(), threading.Event(), type(store).put

    def slow(self: Any, pages: Any, *, deadline: Any) -> Any:
        begun.set()
        assert go_on.wait(WAIT_S)
        return put(self, pages, deadline=deadline)

    monkeypatch.setattr(type(store), "put", slow)
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 4}
    assert here.post("/v1/completions", body, headers=AUTH).status_code == 200
    assert begun.wait(WAIT_S)
    late = purge(here, prompt=PREFIX, from_token=0, timeout_s=0.2)
    assert "has not ended" in late["unreached"]["disk"]
    assert late["whole"] is False
    done: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: done.append(purge(here, prompt=PREFIX, from_token=0)))
    thread.start()
    here.until(lambda: here.running.cache.brain.purges.open is not None)
    go_on.set()
    thread.join(WAIT_S)
    assert done[0]["whole"] is True
    assert done[0]["removed"]["disk"] > 0, "it had come, and was removed behind it"
    assert ask(here, PROMPT)[1] == 0


def test_a_pool_without_a_list_is_purged_of_what_is_known_and_says_so(
    directory: Path, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = f"local:{tmp_path / 'pool'}"
    with serving(
        directory, model, disk_directory=tmp_path / "disk", disk_bytes=16 << 20, pool=pool, num_blocks=64
    ) as here:
        monkeypatch.setattr(here.running.stores["pool"], "listing", lambda: None)
        ask(here, PROMPT)
        num_all = (len(PROMPT) + 3) // size(here)
        found = purge(here, prompt=PREFIX, from_token=0)
        assert found["removed"] == {"device": num_all, "disk": num_all, "pool": num_all}
        assert "keeps no list" in found["unreached"]["pool"]
        assert ask(here, PROMPT)[1] == 0


def test_nonsense_is_refused_by_name(here: Served) -> None:
    assert here.post("/admin/purge", {"whole_tenant": True}).status_code == 401
    assert here.get("/admin/purge", headers=AUTH).status_code == 405
    for body, param in (
        ({}, "prompt"),
        ({"prompt": "x", "whole_tenant": True}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": PREFIX, "from_token": 1 << 20}, "prompt"),
        ({"prompt": PREFIX, "from_token": -1}, "from_token"),
        ({"prompt": PREFIX, "timeout_s": 0}, "timeout_s"),
        ({"prompt": PREFIX, "cache_salt": ""}, "cache_salt"),
        ({"prompt": PREFIX, "tenant": "a"}, "tenant"),
    ):
        found = here.post("/admin/purge", body, headers=AUTH)
        assert (found.status_code, found.json()["error"]["param"]) == (400, param), found.text
    assert here.post("/admin/purge", {"prompt": [1] * (1 << 20)}, headers=AUTH).status_code == 413
    plain = {**AUTH, "content-type": "text/plain"}
    assert here.post("/admin/purge", content=b"{}", headers=plain).status_code == 415


def test_the_command_says_what_went(here: Served, tmp_path: Path) -> None:
    ask(here, PROMPT)
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(PREFIX))
    shown = command(here, "purge", "--tokens", str(ids))
    assert shown.exit_code == 0, shown.stderr
    assert "removed, by tier: device" in shown.stdout
    shown = command(here, "purge", "--whole-tenant", "--json")
    assert json.loads(shown.stdout)["whole"] is True
    assert command(here, "purge").exit_code == 1
    assert command(here, "purge", "short").exit_code == 1
    ids.write_text("nothing")
    assert "is not JSON" in command(here, "purge", "--tokens", str(ids)).stderr


def test_a_server_that_drains_finishes_and_takes_nothing_new(here: Served) -> None:
    with here.openai(KEY) as client:
        stream = client.completions.create(
            model=here.running.name, prompt=PROMPT, temperature=0, max_tokens=200, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        found = here.post("/admin/drain", {}, headers=AUTH).json()
        assert found == {"draining": True, "requests": 1, "drained": False}
        refused = here.post("/v1/completions", {"prompt": "x"}, headers=AUTH)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) > 0
        assert here.get("/health").json()["status"] == "draining"
        assert "".join(chunk.choices[0].text for chunk in stream), "what runs is finished"
    shown = command(here, "drain", "--wait", str(WAIT_S))
    assert shown.exit_code == 0, shown.stderr
    assert "nothing is under way" in shown.stdout
    assert here.get("/admin/state", headers=AUTH).json()["ready"] is False
    assert "taken again" in command(here, "drain", "--undo").stdout
    assert ask(here, PROMPT)[0]
    assert here.post("/admin/drain", {"undo": 1}, headers=AUTH).status_code == 400
    assert here.post("/admin/drain", {}).status_code == 401


def test_a_pin_outlasts_what_else_is_asked_and_is_counted(here: Served) -> None:
    ask(here, PROMPT)
    most = here.get("/admin/pins", headers=AUTH).json()["most_blocks"]
    assert most == 6, "a tenth of 64"
    too_much = here.post("/admin/pins", {"prompt": PROMPT[: 9 * size(here)]}, headers=AUTH)
    assert too_much.status_code == 400
    assert "may keep 6 of 64" in too_much.json()["error"]["message"]
    system = PROMPT[: 4 * size(here)]
    made = here.post("/admin/pins", {"prompt": system, "name": "system"}, headers=AUTH).json()
    assert made == {"name": "system", "num_blocks": 4, "left_s": None, "wanted": 4}
    for first in range(1, 8):
        ask(here, [first, *range(20, 220)])
    with here.running.cache.still() as brain:
        brain.validate()
        assert {key for pin in brain.pins for key in pin.keys} <= {key for key, _, _ in brain.blocks()}
    assert ask(here, PROMPT)[1] >= len(system)
    shown = command(here, "pin")
    assert "4 of 6 blocks are pinned" in shown.stdout
    assert "system: 4 blocks" in shown.stdout
    assert json.loads(command(here, "unpin", "system", "--json").stdout)["pins"] == []
    assert command(here, "unpin", "system").exit_code == 1
    shown = command(here, "pin", "never asked, and long enough for a block of it", "--ttl", "5")
    assert shown.exit_code == 1
    assert "send the prompt once" in shown.stderr
    assert here.post("/admin/pins", {"prompt": system, "ttl_s": 0}, headers=AUTH).status_code == 400
    assert here.post("/admin/unpin", {}, headers=AUTH).status_code == 400
    assert here.post("/admin/pins", {"prompt": system}).status_code == 401


def test_what_is_only_on_disk_is_warmed_into_the_host_tier(
    directory: Path, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "api_key": KEY, "disk_directory": tmp_path / "disk", "disk_bytes": 16 << 20, "num_blocks": 64,
    }  # fmt: skip
    with serving(directory, model, **options) as here:
        text, _ = ask(here, PROMPT)
        ask(here, PREFIX, "alice")
    with serving(directory, model, host_directory=tmp_path / "host", host_bytes=16 << 20, **options) as here:
        num_all, num_prefix = len(PROMPT) // size(here), len(PREFIX) // size(here)
        file = tmp_path / "prompts.jsonl"
        file.write_text(f"{json.dumps(PROMPT)}\n{json.dumps({'prompt': PREFIX, 'cache_salt': 'alice'})}\n")
        shown = command(here, "warm", str(file), "--json")
        assert shown.exit_code == 0, shown.stderr
        assert json.loads(shown.stdout)["held"] == {"host": num_all + num_prefix}
        with here.running.cache.still() as brain:
            assert not brain.blocks(), "nothing came to the device"
            assert not brain.requests
        body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 4}
        answer = here.post("/v1/completions", body, headers=AUTH).json()
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert here.running.metrics.value("hit_tokens_total", tier="host") > 0
        assert here.running.metrics.value("hit_tokens_total", tier="disk") == 0
        found = here.post("/admin/warm", {"prompt": list(range(200, 100, -1))}, headers=AUTH).json()
        assert found == {"blocks": 100 // size(here), "held": {"none": 100 // size(here)}}
        for wrong in ({}, {"prompt": [1]}, {"prompt": PROMPT, "timeout_s": 0}, {"prompt": PROMPT, "file": "x"}):
            assert here.post("/admin/warm", wrong, headers=AUTH).status_code == 400
        file.write_text("nothing\n")
        assert "line 1 is not JSON" in command(here, "warm", str(file)).stderr
        late = command(here, "warm", str(file), "--timeout", "0")
        assert (late.exit_code, "0 of 1 prompts" in late.stdout) == (1, True)


def test_one_store_is_nothing_to_warm(here: Served) -> None:
    found = here.post("/admin/warm", {"prompt": PROMPT}, headers=AUTH)
    assert (found.status_code, "second store" in found.json()["error"]["message"]) == (400, True)


def test_what_may_change_changes_and_the_rest_says_why_not(here: Served) -> None:
    assert here.get("/admin/limits", headers=AUTH).json() == {"policy": "value", "max_waiting": 256}
    free = here.get("/health").json()["free"]
    shown = command(here, "limits", "--policy", "lru", "--max-waiting", "1", "--json")
    assert json.loads(shown.stdout) == {"command": "admin limits", "policy": "lru", "max_waiting": 1}
    assert here.get("/health").json()["free"] == free - 255
    ask(here, PROMPT)
    with here.running.cache.still() as brain:
        brain.validate()
        assert brain.policy == "lru"
    assert "policy lru, max_waiting 1" in command(here, "limits").stdout
    for body, param, words in (
        ({"policy": "newest"}, "policy", "there are: lru"),
        ({"max_waiting": 257}, "max_waiting", "from 0 to 256"),
        ({"max_running": 4}, "max_running", "restart with --max-running"),
        ({"max_body_bytes": 4}, "max_body_bytes", "restart with --max-body-mib"),
        ({"colour": "red"}, "colour", "no field"),
    ):
        found = here.post("/admin/limits", body, headers=AUTH)
        error = found.json()["error"]
        assert (found.status_code, error["param"], words in error["message"]) == (400, param, True), found.text
    here.post("/admin/limits", {"max_waiting": 256}, headers=AUTH)
