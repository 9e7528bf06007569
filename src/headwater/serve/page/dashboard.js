// The dashboard: a client of /admin/stream and /admin/state (docs/DASHBOARD.md). No library, no build step.
//
// Here are the key and the line to the server; dashboard-draw.js draws what is heard, of dashboard-parts.js.
"use strict";

const KEY = "headwater-key"; // in sessionStorage: gone with the tab
const SILENT_MS = 10000; // a stream that says nothing for so long is given up
const HIDDEN_MS = 30000; // a tab that nobody sees stops looking
const POLL_MS = 5000;
const TOLD_MS = 20000;

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

// --- the line to the server --------------------------------------------------------------------------------------------

let key = sessionStorage.getItem(KEY);
let current = null; // what aborts the request under way

function headers(more) {
  return key ? { ...more, authorization: "Bearer " + key } : { ...more };
}

async function problem(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answers ${answer.status}`;
  }
}

function link(how, text) {
  $("link").dataset.link = how;
  say($("link-text"), text);
}

function visible() {
  return new Promise((done) => {
    if (!document.hidden) return done();
    document.addEventListener("visibilitychange", function look() {
      if (!document.hidden) { document.removeEventListener("visibilitychange", look); done(); }
    });
  });
}

let hiding = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(() => current && current.abort(), HIDDEN_MS);
});

function askForKey(why) {
  show($("main"), false);
  show($("ask"), true);
  show($("forget"), false);
  say($("ask-error"), why);
  link("wait", "waits for the key");
  $("key").focus();
  return new Promise((done) => {
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      key = $("key").value.trim();
      $("key").value = "";
      if (!/^[\x21-\x7e]+$/.test(key)) { // a header can say nothing else, and no key has anything else
        say($("ask-error"), "A key has neither blanks nor special characters.");
        return;
      }
      show($("ask"), false);
      done();
    };
  });
}

function welcome() {
  if (key) sessionStorage.setItem(KEY, key);
  show($("forget"), Boolean(key));
  show($("ask"), false);
  if ($("main").hidden) {
    show($("main"), true);
    if (document.activeElement === document.body && key) $("main").focus();
  }
}

$("forget").addEventListener("click", () => {
  key = null; // or an event that comes before the page has gone would remember it again
  sessionStorage.removeItem(KEY);
  location.reload();
});

async function read(answer, heard) {
  const reader = answer.body.getReader(), decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ")) heard(JSON.parse(event.slice(6)));
    }
  }
}

async function look() {
  if (document.documentElement.dataset.key === "wanted" && !key) await askForKey("");
  let failures = 0;
  for (;;) {
    await visible();
    const stop = current = new AbortController();
    let silence = setTimeout(() => stop.abort(), SILENT_MS);
    const heard = (document_) => {
      clearTimeout(silence);
      silence = setTimeout(() => stop.abort(), SILENT_MS);
      failures = 0;
      welcome();
      draw(document_);
    };
    try {
      const answer = await fetch("/admin/stream", { headers: headers(), cache: "no-store", signal: stop.signal });
      if (answer.status === 401) {
        const had = key;
        key = null;
        sessionStorage.removeItem(KEY);
        await askForKey(had ? "That is not this server's key." : await problem(answer));
      } else if (answer.status === 429) {
        await poll(stop.signal, heard);
      } else if (!answer.ok) {
        throw new Error(await problem(answer));
      } else {
        await read(answer, (document_) => { heard(document_); link("live", "live"); });
      }
    } catch (error) {
      failures += 1;
      const why = error.name === "AbortError" ? "nothing was heard" : error.message;
      link("down", `no connection (${why}): trying again`);
    } finally {
      clearTimeout(silence);
    }
    await sleep(failures ? Math.min(15000, 500 * 2 ** failures) : 200);
  }
}

// Others have all streams: ask now and then instead, for a minute.
async function poll(signal, heard) {
  for (let turn = 0; turn < 12; turn += 1) {
    const answer = await fetch("/admin/state", { headers: headers(), cache: "no-store", signal });
    if (!answer.ok) throw new Error(await problem(answer));
    heard(await answer.json());
    link("live", `every ${POLL_MS / 1000} s, because many are looking`);
    await sleep(POLL_MS);
  }
}

// What came of something that was asked for. It goes after a while.
function tell(text) {
  clearTimeout(telling);
  show($("message"), true);
  say($("message"), text);
  telling = setTimeout(() => show($("message"), false), TOLD_MS);
}

let telling = null;

async function revive(what, button) {
  if (button.ariaDisabled === "true") return;
  button.ariaDisabled = "true"; // and not disabled: that would take its focus away
  tell(`Reviving ${what} …`);
  try {
    const answer = await fetch("/admin/revive", {
      method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify({ what }),
    });
    if (!answer.ok) throw new Error(await problem(answer));
    const found = await answer.json();
    tell(found.still_off.length ? `${what} is still off: the server's log says why.` : `${what} is used again.`);
  } catch (error) {
    tell(`${what} was not revived: ${error.message}`);
  } finally {
    button.ariaDisabled = "false";
  }
}

look();
