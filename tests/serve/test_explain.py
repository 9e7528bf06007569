"""`headwater explain` and `/admin/requests`: the right reason at the right place; and who hears what."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import settings
from typer.testing import CliRunner

from brain_kit import fail_at
from explain_kit import BLOCK as STAGE_BLOCK
from explain_kit import SCENES, STORE, Expected, Stage
from headwater.cache.explanations import TextReason
from headwater.cli import app
from headwater.config.serve import ExplainLevel, ServeConfig
from headwater.core.errors import InvalidConfig
from headwater.core.events import NO_TENANT
from headwater.core.keys import block_keys
from headwater.core.results import MISS_REASONS
from headwater.engine.loader import find_device, plan_model
from headwater.engine.make_model import make_model
from headwater.engine.models.base import Model
from headwater.storage.base import Deadline
from headwater.storage.local import LocalStore
from router_kit import world
from serve_kit import WAIT_S, Served, directory, model, serving

__all__ = ["directory", "model"]  # fixtures

BLOCK = 16


@pytest.fixture
def here(directory: Path, model: Model) -> Iterator[Served]:
    """A server of 64 blocks on loopback without a key."""
    with serving(directory, model, num_blocks=64, explain="text") as one:
        yield one


def prompt(seed: int, num_tokens: int = 4 * BLOCK) -> list[int]:
    return random.Random(seed).choices(range(5, 120), k=num_tokens)


def explain(here: Served, request: str, **options: Any) -> Any:
    return here.get(f"/admin/requests/{quote(request, safe='')}", **options)


def rows(here: Served, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an answer's only request."""
    found = explain(here, answer["usage"]["headwater"]["request"])
    assert found.status_code == 200, found.text
    (one,) = found.json()["requests"]
    return list(one["rows"])


def ask(here: Served, tokens: list[int], **body: Any) -> list[dict[str, Any]]:
    return rows(here, here.complete(tokens, max_tokens=2, **body))


def spoil(here: Served, tokens: list[int]) -> None:
    """Flip a byte in the middle of the last of these blocks, on the disk."""
    store = here.running.stores["disk"]
    assert isinstance(store, LocalStore)
    assert store._attachment is not None
    key = block_keys(tokens, parent=here.running.engine.model.identity.root, block_tokens=BLOCK)[-1]
    (place,) = [place for name, place in store._attachment.catalog.mirror.places.items() if name.startswith(key)]
    at = place.offset + here.running.engine.model.layout.page_bytes // 2
    store._attachment.slab.write(at, bytes([store._attachment.slab.read(at, 1)[0] ^ 0x10]))


def test_what_was_never_here_and_what_goes_on(here: Served) -> None:
    first = prompt(1)
    (row,) = ask(here, first)
    assert (row["blocks"], row["tokens"], row["why"]) == ([0, 4], [0, 64], "never_stored")
    hit, more = ask(here, first + prompt(2, 32))
    assert (hit["from"], hit["blocks"]) == ("device", [0, 4])
    assert (more["why"], more["blocks"], more["facts"]) == ("never_stored", [4, 6], {})


def test_a_text_that_goes_another_way_is_shown_to_the_token(here: Served) -> None:
    first = prompt(1)
    near = here.complete(first, max_tokens=2)["usage"]["headwater"]["request"]
    second = [*first[:37], 99 if first[37] != 99 else 98, *first[38:]]
    hit, row = ask(here, second)
    assert (hit["from"], hit["blocks"]) == ("device", [0, 2])
    assert (row["why"], row["counted_as"], row["blocks"]) == ("text_differs", "never_stored", [2, 4])
    decode = here.running.tokenizer.decode
    assert row["facts"] == {
        "token": 37,
        "nearest": f"{near}/0",
        "before": decode(second[21:37]),
        "after": decode(second[37:53]),
    }


def test_another_salt(here: Served) -> None:
    ask(here, prompt(1), cache_salt="one")
    (row,) = ask(here, prompt(1), cache_salt="two")
    assert (row["why"], row["facts"], row["blocks"]) == ("another_salt", {}, [0, 4])


def test_what_had_to_leave_the_device(here: Served) -> None:
    ask(here, prompt(1))
    other = here.complete(prompt(2, 63 * BLOCK), max_tokens=2)  # which needs all slots
    (row,) = ask(here, prompt(1))
    assert (row["why"], row["tier"], row["blocks"]) == ("evicted", "device", [0, 4])
    assert row["facts"]["policy"] == "value"
    assert row["facts"]["was_stored_in"] == ""
    assert row["facts"]["for"] == f"{other['usage']['headwater']['request']}/1"
    assert 0 < row["facts"]["evicted_ago_s"] < WAIT_S


def test_what_only_the_disk_has_and_what_is_wrong_there(directory: Path, model: Model, tmp_path: Path) -> None:
    disk: dict[str, Any] = {"disk_directory": tmp_path / "disk", "disk_bytes": 16 << 20}
    with serving(directory, model, num_blocks=64, **disk) as here:
        ask(here, prompt(1))
        assert here.running.cache.drain(WAIT_S)
    with serving(directory, model, num_blocks=64, **disk) as here:
        spoil(here, prompt(1)[: 3 * BLOCK])
        loaded, row = ask(here, prompt(1))
        assert (loaded["from"], loaded["blocks"]) == ("disk", [0, 2])
        assert (row["why"], row["tier"], row["blocks"]) == ("corrupt", "disk", [2, 4])
        assert row["facts"] == {"found": "corrupt", "block": 2}


def test_what_the_disk_has_of_another_identity(directory: Path, model: Model, tmp_path: Path) -> None:
    disk: dict[str, Any] = {"disk_directory": tmp_path / "disk", "disk_bytes": 16 << 20}
    with serving(directory, model, num_blocks=64, **disk) as here:
        here.complete(prompt(1), max_tokens=2)
        assert here.running.cache.drain(WAIT_S)
    make_model("llama", tmp_path / "other", seed=1)
    plans = [plan_model(tmp_path / "other", dtype=None, kv="auto", block_tokens=size) for size in (BLOCK, 2 * BLOCK)]
    for plan, places in zip(plans, ([0, 4], [0, 2]), strict=True):
        other = plan.load(find_device("cpu"))
        size = other.block_tokens
        options: dict[str, Any] = {"num_blocks": 64, "block_tokens": size, "explain": "blocks", **disk}
        with serving(tmp_path / "other", other, **options) as here:
            (row,) = ask(here, prompt(size))
            assert (row["why"], row["facts"]) == ("never_stored", {})
            (row,) = ask(here, prompt(1), cache_salt="salted")
            assert (row["why"], row["facts"]) == ("never_stored", {}), "who has a salt is not told of others"
            (row,) = ask(here, prompt(1))
            assert (row["why"], row["counted_as"], row["blocks"]) == ("another_identity", "never_stored", places)
            assert row["facts"]["tier"] == "disk"
            short = model.identity.in_short()
            if size == BLOCK:
                assert row["facts"]["differs_in"] == {"weights": short["weights"]}
            else:  # nearer than the first model are the same weights in smaller blocks
                assert set(row["facts"]["differs_in"]) == {"layout", "block_tokens"}
                assert row["facts"]["differs_in"]["block_tokens"] == str(BLOCK)
            assert here.running.cache.drain(WAIT_S)


def test_of_pages_that_nobody_labelled_the_identity_is_told(directory: Path, model: Model, tmp_path: Path) -> None:
    disk: dict[str, Any] = {"disk_directory": tmp_path / "disk", "disk_bytes": 16 << 20}
    with serving(directory, model, num_blocks=64, **disk) as here:
        here.complete(prompt(1), max_tokens=2)
        assert here.running.cache.drain(WAIT_S)
        store = here.running.stores["disk"]
        assert isinstance(store, LocalStore)
        store.label(model.identity.digest, NO_TENANT, "somebody", deadline=Deadline.after(WAIT_S))
    make_model("llama", tmp_path / "other", seed=1)
    other = plan_model(tmp_path / "other", dtype=None, kv="auto", block_tokens=BLOCK).load(find_device("cpu"))
    with serving(tmp_path / "other", other, num_blocks=64, **disk) as here:
        (row,) = ask(here, prompt(1))
        assert row["why"] == "another_identity"
        assert row["facts"] == {"differs_in": {"identity": model.identity.digest.hex()[:8]}, "tier": "disk"}


def test_a_brain_that_failed(here: Served) -> None:
    ask(here, prompt(1))
    fail_at(here.running.cache.brain, 0)
    ask(here, prompt(2))
    (row,) = ask(here, prompt(1))
    assert (row["why"], row["tier"]) == ("failed", "brain")


def test_every_choice_of_an_answer_and_every_answer_of_an_id(here: Served) -> None:
    headers = {"x-request-id": "a/b?c%d"}
    body = {"prompt": prompt(1), "max_tokens": 2, "n": 2, "temperature": 0}
    found = [here.post("/v1/completions", body, headers=headers).json() for _ in range(2)]
    names = [one["usage"]["headwater"]["request"] for one in found]
    assert all(name.startswith("a/b?c%d/") for name in names)
    assert [one["id"] for one in explain(here, names[0]).json()["requests"]] == [f"{names[0]}/1", f"{names[0]}/0"]
    assert len(explain(here, "a/b?c%d").json()["requests"]) == 4
    assert explain(here, f"{names[1]}/3").json()["requests"][0]["hit_blocks"] == 4
    listed = here.get("/admin/requests?limit=3").json()
    assert listed["known"] == 4
    assert [one["id"] for one in listed["requests"]] == [f"{names[1]}/3", f"{names[1]}/2", f"{names[0]}/1"]
    assert listed["requests"][0]["misses"] == {}


# --- who hears what ---------------------------------------------------------------------------------------------------


def test_it_is_behind_the_key_and_for_no_other_site(directory: Path, model: Model) -> None:
    key = {"authorization": "Bearer s3cret"}
    with serving(directory, model, num_blocks=64, api_key="s3cret") as here:
        body = {"prompt": prompt(1), "max_tokens": 2}
        name = here.post("/v1/completions", body, headers=key).json()["usage"]["headwater"]["request"]
        for path in ("/admin/requests", f"/admin/requests/{quote(name, safe='')}"):
            assert here.get(path).status_code == 401
            assert here.get(path, headers={**key, "sec-fetch-site": "cross-site"}).status_code == 403
            found = here.get(path, headers=key)
            assert (found.status_code, found.headers["cache-control"]) == (200, "no-store")
            assert here.post(path, {}, headers=key).status_code == 405
        for limit in ("0", "1001", "-1", "many", "1.5"):
            assert here.get(f"/admin/requests?limit={limit}", headers=key).json()["error"]["param"] == "limit"
        assert explain(here, "nobody", headers=key).json()["error"]["code"] == "not_found"
        shown = CliRunner().invoke(app, ["explain", name, "--url", here.url, "--api-key", "s3cret"])
        assert (shown.exit_code, "never stored" in shown.stdout) == (0, True), shown.stderr
        value = here.running.metrics.value  # which counts an answer when all of it was sent
        here.until(lambda: value("http_requests_total", endpoint="/admin/requests", status="200") == 3)


def test_at_the_level_of_blocks_nobody_learns_more_than_timing_tells(directory: Path, model: Model) -> None:
    with serving(directory, model, num_blocks=64, explain="blocks") as here:
        tokens = prompt(1)
        ask(here, tokens)
        for at in (3, 12, 15):  # inside the first block: whoever guesses a part of it hears nothing
            (row,) = ask(here, [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]])
            assert (row["why"], row["facts"]) == ("never_stored", {})
        _, row = ask(here, [*tokens[:37], tokens[37] ^ 1, *tokens[38:]])
        assert (row["why"], row["blocks"], row["facts"]) == ("text_differs", [2, 4], {})
        (row,) = ask(here, tokens, cache_salt="another")
        assert (row["why"], row["facts"]) == ("never_stored", {})


@pytest.mark.parametrize(
    ("options", "level"),
    [
        ({}, "tokens"),
        ({"api_key": "k"}, "blocks"),
        ({"host": "0.0.0.0"}, "blocks"),
        ({"host": "0.0.0.0", "explain": "text"}, "text"),
    ],
)
def test_tokens_are_told_where_nobody_else_is(options: dict[str, Any], level: str) -> None:
    assert ServeConfig(model=Path("model"), **options).explain is ExplainLevel(level)


def test_a_level_that_is_none() -> None:
    with pytest.raises(InvalidConfig, match="explain is one of blocks, tokens, text, not 'all'"):
        ServeConfig(model=Path("model"), explain="all")  # type: ignore[arg-type]


# --- who asks ---------------------------------------------------------------------------------------------------------


def command(here: Served, *words: str) -> Any:
    return CliRunner().invoke(app, ["explain", *words, "--url", here.url])


def test_the_command(here: Served) -> None:
    assert "no request is over yet" in command(here, "--last").stdout
    ask(here, prompt(1))
    second = [*prompt(1)[:37], 3, *prompt(1)[38:]]
    name = here.complete(second, max_tokens=2)["usage"]["headwater"]["request"]
    for words in ((name,), ("--last",), (name.partition("/")[0],)):
        shown = command(here, *words)
        assert shown.exit_code == 0, shown.stderr
        assert "2 of 4 blocks were hits" in shown.stdout
        assert "text differs, at token 37" in " ".join(shown.stdout.split())
    document = json.loads(command(here, name, "--json").stdout)
    assert document == {**explain(here, name).json(), "requests": document["requests"]}
    assert document["requests"][0]["rows"][1]["facts"]["token"] == 37
    assert command(here).exit_code == command(here, name, "--last").exit_code == 1
    missing = command(here, "nobody")
    assert (missing.exit_code, "no request 'nobody'" in missing.stderr) == (1, True), missing.stderr


@pytest.mark.parametrize("answer", [{}, [], {"format": 2, "requests": []}, None])
def test_what_is_no_server_of_ours_is_one_line(answer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.serve.explain.ask_server", lambda *_, **__: answer)
    for words in (["--last"], ["some-id"]):
        shown = CliRunner().invoke(app, ["explain", *words])
        assert (shown.exit_code, "has no explanations" in shown.stderr) == (1, True)


def test_without_a_cache_nobody_is_said_to_have_another_salt(directory: Path, model: Model) -> None:
    with serving(directory, model, num_blocks=64, cache=False) as here:
        ask(here, prompt(1))
        (row,) = ask(here, prompt(1))
        assert (row["why"], row["facts"]) == ("never_stored", {})


def test_a_router_says_who_knows() -> None:
    with world() as here:
        node = here.add("m1", "mixed")
        for path in ("/admin/requests", "/admin/requests/some/id"):
            found = here.client.get(path)
            assert (found.status_code, found.json()["error"]["code"]) == (404, "ask_the_node")
            assert f"m1 at {node.url}" in found.json()["error"]["message"]


# --- made to miss -----------------------------------------------------------------------------------------------------


def check(stage: Stage, made: Expected) -> None:
    """All rows, and of the one that is a miss why, where and what is known of it."""
    rows = stage.explained(made.request)
    total = len(made.request.prompt) // STAGE_BLOCK
    on_device = made.start - made.loaded
    places = [
        ("device", 0, on_device),
        (STORE, on_device, made.start),
        (made.why, made.start, made.end),
        (STORE, made.end, made.end + made.behind),
    ]
    assert made.end + made.behind == total
    found = [(row.get("from", row.get("why")), *row["blocks"]) for row in rows]
    assert found == [place for place in places if place[1] < place[2]], made
    (row,) = [row for row in rows if "why" in row]
    assert row["tokens"] == [made.start * STAGE_BLOCK, made.end * STAGE_BLOCK]
    assert row["tier"] == made.tier
    assert made.facts.items() <= row["facts"].items(), (made, row)
    if made.why == "not_worth_it" and made.tier is not None:
        assert row["facts"]["load_s"] * row["facts"]["worth"] > row["facts"]["compute_s"]
    if made.why in ("never_stored", "another_salt", "computed_meanwhile"):
        assert row["facts"] == made.facts, "something of another request's"


def test_a_thousand_requests_that_were_made_to_miss() -> None:
    """Default: 1,000 over all reasons. Nightly: 1,000 for each of them."""
    nightly = settings().max_examples > 100
    made: Counter[str] = Counter()
    stage = Stage(20)  # all of them on one, but those that want their own
    scenes = SCENES * (1000 if nightly else 1 + 1000 // len(SCENES))
    for number, scene in enumerate(random.Random(20).sample(scenes, len(scenes))):
        here = Stage(number) if scene == "computed_meanwhile" else stage
        expected = getattr(here, scene)()
        check(here, expected)
        made[expected.why] += 1
    assert {str(reason) for reason in (*MISS_REASONS, *TextReason)} == set(made)
    assert sum(made.values()) >= 1000
    assert min(made.values()) >= 40
