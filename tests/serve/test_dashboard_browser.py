"""The dashboard in a real browser: it asks for the key, shows what is so, and can be used without a mouse."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser_kit import ENTER, TAB, Browser, browsing
from headwater.engine.models.base import Model
from headwater.serve import page
from router_kit import world
from serve_kit import WAIT_S, Served, directory, model, serving
from test_dashboard import board_of
from test_serve_revive import KEY, PROMPT, ask, switch_off

__all__ = ["directory", "model"]  # fixtures

_CONTRAST = """
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const light = (text) => {
  const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = parse(text).slice(0, 3).map((c) => linear(c / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const back = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (parse(colour)[3] !== 0) return colour;
  }
  return "rgb(255, 255, 255)";
};
const found = {};
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!own || !element.checkVisibility() || element.matches(".hide, .skip, .hide *")) continue;
  const [a, b] = [light(getComputedStyle(element).color), light(back(element))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) found[element.textContent.slice(0, 40)] = ratio;
}
return found;
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all tests: it takes seconds to start."""
    with browsing(tmp_path_factory.mktemp("browser")) as one:
        yield one


@pytest.fixture(autouse=True)
def clean(browser: Browser) -> Iterator[None]:
    """Each test begins and ends with an empty page."""
    browser.prefer("light")
    yield
    browser.open("about:blank")
    browser.complaints()


@pytest.fixture
def here(directory: Path, model: Model, tmp_path: Path) -> Iterator[Served]:
    """A server with a disk tier that wants a key."""
    disk: dict[str, Any] = {"disk_directory": tmp_path / "disk", "disk_bytes": 16 << 20}
    with serving(directory, model, api_key=KEY, num_blocks=64, **disk) as one:
        yield one


def say_key(browser: Browser, key: str) -> None:
    """Type it and press Enter: the field has the focus."""
    browser.until(lambda: browser.run("return document.activeElement.id") == "key")
    browser.press(*key, ENTER)


def look(browser: Browser, here: Served) -> None:
    browser.open(f"{here.url}/")
    say_key(browser, KEY)
    browser.until(lambda: browser.text("#link-text") == "live")


def test_it_asks_for_the_key_and_shows_numbers_that_move(browser: Browser, here: Served) -> None:
    browser.open(f"{here.url}/")
    browser.until(lambda: "wants its API key" in browser.text("#ask"))
    assert browser.text("main") == ""
    assert browser.complaints() == [], "it does not try without a key"
    say_key(browser, "another")
    browser.until(lambda: "not this server's key" in browser.text("#ask-error"))
    assert all("401" in one for one in browser.complaints())
    say_key(browser, KEY)
    browser.until(lambda: browser.text("#link-text") == "live")
    assert browser.text("#ask") == ""
    assert here.server._service.node in browser.text("#who")
    assert "Nothing has missed yet." in browser.text("main")
    ask(here)
    browser.until(lambda: browser.text("#misses-sum") == "96")
    assert browser.text("#misses-all") == "100.0 %"
    assert "never stored" in browser.text("#misses")
    ask(here)
    browser.until(lambda: "50.0 %" in browser.text("#cards"))
    assert "device 96 (50.0 %)" in " ".join(browser.text("#tokens-legend").split())
    assert here.running.cache.drain(WAIT_S)
    browser.until(lambda: "of 16.0 MiB" in browser.text("#tiers"))
    browser.until(lambda: browser.run("return document.querySelector('#tokens .f0').getAttribute('d')"))
    browser.open(f"{here.url}/")  # in the same tab: the key is still known
    browser.until(lambda: browser.text("#link-text") == "live")
    assert browser.run("return localStorage.length") == 0
    assert browser.complaints() == []
    browser.click("#forget")
    browser.until(lambda: "wants its API key" in browser.text("#ask"))
    say_key(browser, KEY)
    browser.until(lambda: browser.text("#link-text") == "live")
    left = browser.run("document.getElementById('forget').click(); welcome(); return sessionStorage.length")
    assert left == 0, "an event that comes before the page has gone does not remember the key again"
    browser.until(lambda: "wants its API key" in browser.text("#ask"))
    assert browser.run("return sessionStorage.length") == 0


def test_the_key_is_in_no_address_and_nobody_else_is_asked(browser: Browser, here: Served) -> None:
    look(browser, here)
    sent = [url for url in browser.requested() if not url.startswith("data:")]
    assert all(url.startswith("http://127.0.0.1:") for url in sent)
    ours = {url.removeprefix(here.url) for url in sent if url.startswith(here.url)}
    assert ours == {*page.FILES, "/admin/stream"}


def test_a_tier_goes_off_and_comes_back_by_its_button(browser: Browser, here: Served) -> None:
    look(browser, here)
    browser.until(lambda: "in use" in browser.text("#tiers"))
    assert browser.text("#alerts") == ""
    switch_off(here)
    browser.until(lambda: "disk is switched off" in browser.text("#alerts"))
    assert "disk is switched off" in browser.text("#news"), "said to who cannot see it"
    assert "off" in browser.text("#tiers tr:nth-child(2) .state")
    assert browser.run("return document.title").startswith("! ")
    browser.click("#alerts button")
    browser.until(lambda: browser.text("#alerts") == "")
    browser.until(lambda: browser.text("#message") == browser.text("#news") == "disk is used again.")
    assert "in use" in browser.text("#tiers tr:nth-child(2) .state")
    assert not here.running.cache.troubles()
    assert browser.complaints() == []


def test_it_can_be_used_with_the_keyboard_alone(browser: Browser, here: Served) -> None:
    look(browser, here)
    switch_off(here)
    browser.until(lambda: "disk is switched off" in browser.text("#alerts"))
    for _ in range(40):
        browser.press(TAB)
        if browser.run("return document.activeElement.getAttribute('aria-label')") == "Revive disk":
            break
    name, outline = "e.getAttribute('aria-label')", "getComputedStyle(e).outlineStyle"
    focused = f"const e = document.activeElement; return [e.tagName, {name}, {outline}]"
    assert browser.run(focused) == ["BUTTON", "Revive disk", "solid"]
    shown = browser.text("#cards")
    ask(here, [9, *PROMPT])
    browser.until(lambda: browser.text("#cards") != shown)
    assert browser.run(focused)[1] == "Revive disk", "what changes takes no focus away"
    browser.press(ENTER)
    browser.until(lambda: browser.text("#alerts") == "")
    browser.until(lambda: not here.running.cache.troubles())
    assert browser.run("return document.activeElement.id") in ("message", "main"), "not lost"
    assert browser.complaints() == []


def test_light_and_dark_can_both_be_read(browser: Browser, here: Served) -> None:
    look(browser, here)
    ask(here)
    switch_off(here)
    browser.until(lambda: "disk is switched off" in browser.text("#alerts"))
    backs = set()
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        assert browser.run(_CONTRAST) == {}, scheme
        backs.add(browser.run("return getComputedStyle(document.documentElement).backgroundColor"))
    assert len(backs) == 2
    assert browser.complaints() == []


def test_everything_has_a_name_for_who_hears_the_page(browser: Browser, here: Served) -> None:
    look(browser, here)
    ask(here)
    switch_off(here)
    browser.until(lambda: "disk is switched off" in browser.text("#alerts"))
    tree: list[dict[str, Any]] = browser.cdp("Accessibility.getFullAXTree")["nodes"]
    heard = [node for node in tree if not node.get("ignored", False)]
    seen = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in heard]
    roles = {role for role, _ in seen}
    assert {"banner", "main", "heading", "table", "columnheader", "rowheader", "button", "status", "image"} <= roles
    named = ("button", "image", "textbox", "table", "region", "columnheader", "rowheader", "heading", "link")
    assert not [role for role, name in seen if role in named and role != "table" and not name.strip()]
    assert browser.run("return document.documentElement.lang") == "en"
    live = browser.run("return [...document.querySelectorAll('main [aria-live], main [role=status]')].length")
    assert live == 0, "numbers that change each second are not read out"


def test_names_from_outside_are_text(browser: Browser, here: Served) -> None:
    look(browser, here)
    evil = "<img src=x onerror=document.title=1><b>"
    here.running.metrics.event(evil, why=evil)
    browser.until(lambda: "<img" in browser.text("#events"))
    assert browser.run("return document.querySelectorAll('#events img, #events b').length") == 0
    assert browser.complaints() == []


def test_a_server_that_is_gone_and_one_with_many_who_look(browser: Browser, directory: Path, model: Model) -> None:
    with serving(directory, model, num_blocks=64) as here:  # without a key
        board = board_of(here)
        board._max_streams = 0
        browser.open(f"{here.url}/")
        browser.until(lambda: "many are looking" in browser.text("#link-text"))
        assert browser.text("#ask") == ""
        assert browser.text("#forget") == ""
        assert "Hit ratio" in browser.text("#cards")
        assert all("429" in one for one in browser.complaints())
        board._max_streams = 8
        browser.open(f"{here.url}/")
        browser.until(lambda: browser.text("#link-text") == "live")
        here.stop()
        browser.until(lambda: "no connection" in browser.text("#link-text"))
        assert "Hit ratio" in browser.text("#cards"), "what was known last stays"


def test_a_router_shows_its_fleet(browser: Browser) -> None:
    with world() as here:
        browser.open(f"{here.url}/")
        browser.until(lambda: "No node is here." in browser.text("main"))
        browser.until(lambda: "has no nodes that could answer" in browser.text("#alerts"))
        assert browser.text("#tiers") == ""
        node = here.add("<b>m1", "mixed", load={"running": 3, "waiting": 2, "free_slots": 5})
        row = browser.until(lambda: browser.text("#nodes tr"))
        assert row.split()[:6] == ["<b>m1", "mixed", "usable", "3", "2", "5"]
        browser.until(lambda: browser.text("#alerts") == "")
        assert here.complete().status_code == 200
        browser.until(lambda: "Answered 1" in " ".join(browser.text("#cards").split()))
        assert here.join(node, lease_s=0).status_code == 200
        browser.until(lambda: browser.text("#nodes tr") == "")
        assert "node left" in browser.text("#events")
        assert browser.complaints() == []
        browser.open("about:blank")  # or the router would wait for it to leave
