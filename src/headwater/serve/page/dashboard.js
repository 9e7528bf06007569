// The dashboard: a client of /admin/stream and /admin/state (docs/DASHBOARD.md). No library, no build step.
//
// Text from outside (names, ids, events) is only ever set as text, never as markup. Elements are updated in place, so that
// whoever has the focus, or reads, is not disturbed each second. Series over time are kept here and nowhere else.
"use strict";

const KEY = "headwater-key"; // in sessionStorage: gone with the tab
const BIN_S = 5, NUM_BINS = 60; // of the plots
const GAP_S = 15; // between two documents: what was counted in between belongs to no bin
const SILENT_MS = 10000; // a stream that says nothing for so long is given up
const HIDDEN_MS = 30000; // a tab that nobody sees stops looking
const POLL_MS = 5000;
const TOLD_MS = 20000;
const SVG = "http://www.w3.org/2000/svg";

const $ = (id) => document.getElementById(id);
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

// --- how numbers are said ----------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const count = (n) => (n === null || n === undefined ? "–" : Math.abs(n) < 1e6 ? whole.format(n) : short.format(n));
const percent = (part) => (part === null ? "–" : (100 * part).toFixed(1) + " %");

function seconds(s) {
  if (s === null || s === undefined) return "–";
  const size = Math.abs(s);
  if (size === 0) return "0 s";
  if (size < 0.001) return (s * 1e6).toFixed(0) + " µs";
  if (size < 1) return (s * 1e3).toFixed(size < 0.1 ? 1 : 0) + " ms";
  if (size < 100) return s.toFixed(size < 10 ? 2 : 1) + " s";
  if (size < 7200) return whole.format(s) + " s";
  return (s / 3600).toFixed(1) + " h";
}

function bytes(n) {
  if (n === null || n === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (Math.abs(n) >= 1024 && at < units.length - 1) { n /= 1024; at += 1; }
  return (at === 0 || n >= 100 ? n.toFixed(0) : n.toFixed(1)) + " " + units[at];
}

const rate = (n) => (n === null || n === undefined ? "–" : bytes(n) + "/s");
const tokensPerSecond = (n) => (n === null || n === undefined ? "–" : count(n) + " tok/s");
const words = (name) => name.replaceAll("_", " ");

function clock(at_s) {
  const at = new Date(at_s * 1000), pad = (n) => String(n).padStart(2, "0");
  const day = at.toDateString() === new Date().toDateString() ? "" : `${at.getMonth() + 1}-${pad(at.getDate())} `;
  return `${day}${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
}

// --- elements ----------------------------------------------------------------------------------------------------------

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// What is hidden or removed takes the focus with it: then it goes to what was said last, and is not lost.
function show(element, visible) {
  if (element.hidden !== visible) return;
  const hadFocus = !visible && element.contains(document.activeElement);
  element.hidden = !visible;
  if (hadFocus) keepFocus();
}

function keepFocus() {
  ($("message").hidden ? $("main") : $("message")).focus();
}

// One child for each item, found again by its key: made once, filled each time, removed with its item.
function list(parent, items, keyOf, build, fill) {
  const known = parent.byKey || (parent.byKey = new Map());
  const wanted = new Set(items.map(keyOf));
  for (const [key, one] of known) {
    if (wanted.has(key)) continue;
    const hadFocus = one.element.contains(document.activeElement);
    one.element.remove();
    known.delete(key);
    if (hadFocus) keepFocus();
  }
  items.forEach((item, i) => {
    const key = keyOf(item);
    let one = known.get(key);
    if (!one) { one = build(item); known.set(key, one); }
    fill(one, item);
    if (parent.children[i] !== one.element) parent.insertBefore(one.element, parent.children[i] || null);
  });
}

function row(...cells) {
  const element = make("tr");
  element.append(...cells);
  return element;
}

// --- the line to the server --------------------------------------------------------------------------------------------

let key = sessionStorage.getItem(KEY);
let current = null; // what aborts the request under way
let state = null; // the newest document

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

// --- series over time --------------------------------------------------------------------------------------------------

const bins = new Map(); // by number: { hit: {tier: tokens}, missed, saved: {tier: s}, lost: {tier: s} }
let before = null;

function grown(now, then) {
  const found = {};
  for (const [name, value] of Object.entries(now)) {
    const more = value - (then[name] || 0);
    if (more < 0) return null; // the server began anew
    if (more > 0) found[name] = more;
  }
  return found;
}

function remember(now) {
  const newest = Math.floor(now.now_s / BIN_S);
  for (const bin of bins.keys()) if (bin <= newest - NUM_BINS || bin > newest) bins.delete(bin);
  const then = before;
  before = now;
  if (!then || now.now_s - then.now_s > GAP_S || now.now_s < then.now_s) return;
  const hit = grown(now.hit_tokens, then.hit_tokens);
  const missed = now.miss_tokens - then.miss_tokens;
  const saved = grown(now.seconds.saved, then.seconds.saved), lost = grown(now.seconds.lost, then.seconds.lost);
  if (!hit || missed < 0 || !saved || !lost) return;
  const bin = bins.get(newest) || { hit: {}, missed: 0, saved: {}, lost: {} };
  const add = (sums, more) => { for (const name in more) sums[name] = (sums[name] || 0) + more[name]; };
  add(bin.hit, hit);
  add(bin.saved, saved);
  add(bin.lost, lost);
  bin.missed += missed;
  bins.set(newest, bin);
}

const sum = (values) => Object.values(values).reduce((a, b) => a + b, 0);

// A round number above a value: where an axis ends.
function above(value) {
  if (!(value > 0)) return 0;
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((n) => n * size).find((end) => end >= value);
}

// Stacked bars: `up` and `down` name, for each bin, what lies on each other from the zero line on, in the order of names.
function plot(svg, names, up, down) {
  const newest = before ? Math.floor(before.now_s / BIN_S) : 0;
  let most = 0, least = 0;
  for (const bin of bins.values()) {
    most = Math.max(most, sum(up(bin)));
    least = Math.max(least, sum(down(bin)));
  }
  const top = above(most), bottom = above(least), span = top + bottom || 1;
  const width = 600 / NUM_BINS, height = 150, zero = (height * (top || (bottom ? 0 : 1))) / span;
  const paths = Object.fromEntries(names.map((name) => [name, ""]));
  for (const [number, bin] of bins) {
    const x = (number - newest + NUM_BINS - 1) * width;
    for (const [values, sign] of [[up(bin), -1], [down(bin), 1]]) {
      let y = top || bottom ? zero : height;
      for (const name of names) {
        const size = ((values[name] || 0) * height) / span;
        if (!size) continue;
        paths[name] += `M${x + 1} ${y.toFixed(2)}h${width - 2}v${(sign * size).toFixed(2)}h${2 - width}z`;
        y += sign * size;
      }
    }
  }
  const lines = [["grid", 0], ["grid", height / 2], ["zero", top || bottom ? zero : height]];
  const parts = [
    ...lines.map(([kind, y], i) => ({ id: "line" + i, kind, d: `M0 ${y}H600` })),
    ...names.map((name) => ({ id: name, kind: colour("f", name), d: paths[name] })),
  ];
  list(svg, parts, (part) => part.id, () => ({ element: document.createElementNS(SVG, "path") }), (one, part) => {
    if (one.element.getAttribute("d") !== part.d) one.element.setAttribute("d", part.d);
    if (one.element.getAttribute("class") !== part.kind) one.element.setAttribute("class", part.kind);
  });
  return { top, bottom };
}

function colour(prefix, name) {
  const at = state.tiers.findIndex((tier) => tier.name === name);
  return prefix + (at >= 0 && at < 5 ? at : "x");
}

function legend(parent, entries) {
  list(parent, entries, (entry) => entry.name, (entry) => {
    const element = make("li"), swatch = make("span", "swatch"), value = make("b");
    swatch.setAttribute("aria-hidden", "true");
    element.append(swatch, make("span", "", entry.label), value);
    return { element, swatch, value };
  }, (one, entry) => {
    one.swatch.className = "swatch " + colour("b", entry.name);
    say(one.value, entry.value);
  });
}

// --- drawing -----------------------------------------------------------------------------------------------------------

function draw(now) {
  announce(state, now);
  state = now;
  const isRouter = now.kind === "router";
  const who = [now.name, now.role === now.name ? null : now.role, now.model, "version " + now.version];
  say($("who"), who.filter(Boolean).join("  ·  "));
  document.title = (trouble(now).length ? "! " : "") + `${now.name} – Headwater`;
  for (const part of document.querySelectorAll("[data-for]")) {
    const wanted = { cache: !isRouter, tiers: !isRouter, fleet: isRouter, requests: now.kind !== "metrics" }[part.dataset.for];
    show(part, wanted !== false);
  }
  for (const cell of document.querySelectorAll("#flights-table thead [data-col]")) {
    show(cell, (cell.dataset.col === "router") === isRouter);
  }
  drawAlerts(now);
  if (isRouter) {
    drawRouterCards(now);
    drawFleet(now.fleet);
  } else {
    remember(now);
    drawCards(now);
    drawPlots(now);
    drawTiers(now);
    drawMisses(now);
  }
  drawFlights(now, isRouter);
  drawEvents(now);
}

function trouble(now) {
  const found = now.tiers.filter((tier) => tier.state === "off" || tier.state === "open")
    .map((tier) => ({ name: tier.name, off: tier.state === "off", revivable: tier.revivable,
      text: tier.state === "off" ? `is switched off: ${tier.why || "no reason was given"}` : "fails, and is left alone for a moment" }));
  if (now.brain.failed) {
    found.unshift({ name: "brain", off: true, revivable: now.can_revive, text: `failed, and every block is a miss: ${now.brain.failed}` });
  }
  if (!now.ready) {
    const text = { router: "has no nodes that could answer a request", metrics: "does not tell its metrics" }[now.kind] || "does not answer requests";
    found.unshift({ name: "server", off: true, revivable: false, text });
  }
  return found;
}

// What a screen reader should hear without being asked: that something went off, or came back. Others see it.
function announce(then, now) {
  if (!then) return;
  const was = new Map(trouble(then).filter((one) => one.off).map((one) => [one.name, one]));
  const is = new Map(trouble(now).filter((one) => one.off).map((one) => [one.name, one]));
  for (const [name, one] of is) if (!was.has(name)) say($("news"), `${name} ${one.text}`);
  for (const name of was.keys()) if (!is.has(name)) say($("news"), `${name} is used again.`);
}

function reviveButton(name) {
  const button = make("button", "", "Revive");
  button.type = "button";
  button.setAttribute("aria-label", `Revive ${name}`);
  button.addEventListener("click", () => revive(name, button));
  return button;
}

function drawAlerts(now) {
  const found = trouble(now);
  list($("alert-list"), found, (one) => one.name, (one) => {
    const element = make("li"), span = make("span"), text = make("span");
    span.append(make("strong", "", one.name), " ", text);
    element.append(span);
    const button = reviveButton(one.name);
    element.append(button);
    return { element, text, button };
  }, (one, item) => {
    say(one.text, item.text);
    show(one.button, item.revivable);
  });
  show($("alerts"), found.length > 0);
}

function cards(entries) {
  list($("cards"), entries, (entry) => entry[0], (entry) => {
    const element = make("div"), big = make("dd", "big"), small = make("dd", "small");
    element.append(make("dt", "", entry[0]), big, small);
    return { element, big, small };
  }, (one, [, big, small]) => { say(one.big, big); say(one.small, small); });
}

function drawCards(now) {
  const tokens = now.miss_tokens + sum(now.hit_tokens);
  let hits = 0, misses = 0;
  for (const bin of bins.values()) { hits += sum(bin.hit); misses += bin.missed; }
  const lately = hits + misses ? `; ${percent(hits / (hits + misses))} lately` : "";
  const { saved_total: saved, lost_total: lost, waited_total: waited } = now.seconds;
  const net = saved - lost, engine = now.engine;
  const found = [
    ["Hit ratio", percent(now.hit_ratio), `of ${count(tokens)} prompt tokens${lately}`],
    ["Seconds saved", (net > 0 ? "+" : "") + seconds(net), `${seconds(saved)} saved, ${seconds(lost)} lost, ${seconds(waited)} waited`],
  ];
  if (engine) {
    const fit = engine.free === null ? "" : `, ${count(engine.free)} more fit`;
    found.push(["In the engine", count(engine.running + engine.waiting), `${count(engine.running)} running, ${count(engine.waiting)} waiting${fit}`]);
  }
  if (now.kind === "metrics") {
    found.push(["Requests", count(sum(now.requests.looked_up)), "looked up since the start"]);
  } else {
    found.push(["Speed", tokensPerSecond(engine.prefill_tokens_per_s), `of prompts; answers at ${tokensPerSecond(engine.decode_tokens_per_s)}`]);
  }
  cards(found);
}

function drawRouterCards(now) {
  const { nodes, num_nodes: numNodes, queues } = now.fleet, answered = now.requests.answered;
  const usable = nodes.filter((node) => node.state === "usable").length;
  const roles = {};
  for (const node of nodes) roles[node.role] = (roles[node.role] || 0) + 1;
  const failed = sum(answered) - (answered.answered || 0);
  const others = Object.entries(answered).filter(([how]) => how !== "answered").map(([how, n]) => `${count(n)} ${how}`);
  cards([
    ["Nodes", count(numNodes), `${usable} usable` + Object.entries(roles).map(([role, n]) => `, ${n} ${role}`).join("")],
    ["In flight", count(queues.requests), `${count(queues.waiting_for_entry + queues.waiting_for_decode)} wait for room`],
    ["Answered", count(answered.answered || 0), "since the start"],
    ["Not answered", count(failed), others.join(", ") || "none"],
  ]);
}

function drawPlots(now) {
  const tiers = Object.keys(now.hit_tokens);
  const tokens = plot($("tokens"), [...tiers, "missed"], (bin) => ({ ...bin.hit, missed: bin.missed }), () => ({}));
  say($("tokens-top"), tokens.top ? count(tokens.top) : "nothing in the last 5 minutes");
  const all = now.miss_tokens + sum(now.hit_tokens);
  const share = (n) => `${count(n)}` + (all ? ` (${percent(n / all)})` : "");
  legend($("tokens-legend"), [
    ...tiers.map((name) => ({ name, label: name, value: share(now.hit_tokens[name]) })),
    { name: "missed", label: "computed", value: share(now.miss_tokens) },
  ]);
  $("tokens").setAttribute("aria-label", `Prompt tokens by source over five minutes: at most ${count(tokens.top)} in five seconds`);

  const { saved, lost } = now.seconds;
  const names = [...tiers, ...Object.keys(lost).filter((name) => !(name in now.hit_tokens))];
  const time = plot($("seconds"), names, (bin) => bin.saved, (bin) => bin.lost);
  say($("seconds-top"), time.top ? "+" + seconds(time.top) : time.bottom ? "" : "nothing in the last 5 minutes");
  say($("seconds-bottom"), time.bottom ? "−" + seconds(time.bottom) : "");
  legend($("seconds-legend"), names.map((name) => ({
    name, label: name === "none" ? "nothing found" : name,
    value: [saved[name] || !lost[name] ? "+" + seconds(saved[name] || 0) : "", lost[name] ? "−" + seconds(lost[name]) : ""].join(" ").trim(),
  })));
  $("seconds").setAttribute("aria-label", `Seconds saved and lost by tier over five minutes: at most ${seconds(time.top)} saved and ${seconds(time.bottom)} lost in five seconds`);
}

const TIER_STATES = {
  closed: ["in use", "ok"], half_open: ["being tried", "mid"], open: ["left alone", "mid"], off: ["off", "off"], unused: ["not used", "mid"],
};

function drawTiers(now) {
  list($("tiers"), now.tiers, (tier) => tier.name, (tier) => {
    const name = make("th", "", tier.name), stateCell = make("td"), mark = make("span", "state");
    name.scope = "row";
    stateCell.append(mark);
    const fillCell = make("td"), fill = make("div", "fill"), bar = make("div", "bar"), inner = make("i");
    const amount = make("span", "amount"), action = make("td", "n"), button = reviveButton(tier.name);
    bar.setAttribute("aria-hidden", "true");
    bar.append(inner);
    fill.append(bar, amount);
    fillCell.append(fill);
    action.append(button);
    const numbers = Array.from({ length: 6 }, () => make("td", "n"));
    return { element: row(name, stateCell, fillCell, ...numbers, action), mark, bar, inner, amount, numbers, button };
  }, (one, tier) => {
    const [word, kind] = TIER_STATES[tier.state] || ["not known", "mid"];
    say(one.mark, word);
    one.mark.className = "state " + kind;
    one.inner.className = colour("b", tier.name);
    const part = tier.limit_bytes ? Math.min(1, tier.used_bytes / tier.limit_bytes) : 0;
    one.inner.style.width = (100 * part).toFixed(1) + "%";
    one.bar.style.visibility = tier.limit_bytes ? "visible" : "hidden";
    say(one.amount, tier.limit_bytes ? `${bytes(tier.used_bytes)} of ${bytes(tier.limit_bytes)}  (${percent(part)})` : "not known here");
    const said = [
      count(tier.hit_tokens), seconds(tier.saved_s), seconds(tier.lost_s), rate(tier.load_bytes_per_s), rate(tier.save_bytes_per_s),
      tier.queued_bytes ? bytes(tier.queued_bytes) : "–",
    ];
    said.forEach((text, i) => say(one.numbers[i], text));
    show(one.button, tier.revivable);
  });
}

function drawMisses(now) {
  list($("misses"), now.misses, (miss) => miss.reason, (miss) => {
    const name = make("th", "", words(miss.reason)), cell = make("td"), bar = make("div", "bar"), inner = make("i", "bx");
    name.scope = "row";
    bar.setAttribute("aria-hidden", "true");
    bar.append(inner);
    cell.append(bar);
    const tokens = make("td", "n"), share = make("td", "n");
    return { element: row(name, cell, tokens, share), inner, tokens, share };
  }, (one, miss) => {
    one.inner.style.width = miss.percent + "%";
    say(one.tokens, count(miss.tokens));
    say(one.share, miss.percent.toFixed(1) + " %");
  });
  const total = now.misses.reduce((all, miss) => all + Math.round(miss.percent * 10), 0) / 10;
  say($("misses-sum"), count(now.miss_tokens));
  say($("misses-all"), total.toFixed(1) + " %");
  show($("misses-foot"), now.misses.length > 0);
  show($("misses-none"), now.misses.length === 0);
}

function drawFlights(now, isRouter) {
  const { oldest, in_flight: total, phases } = now.requests;
  const parts = Object.entries(phases).map(([phase, n]) => `${count(n)} ${words(phase)}`);
  if (total > oldest.length) parts.push(`the oldest ${oldest.length} of ${count(total)} are shown`);
  say($("phases"), parts.join(", "));
  list($("flights"), oldest.map((one, i) => ({ ...one, i })), (one) => one.id + " " + one.i, () => {
    const id = make("td", "id"), phase = make("td"), age = make("td", "n");
    const more = isRouter ? [make("td")] : [make("td", "n"), make("td", "n"), make("td", "n")];
    return { element: row(id, phase, age, ...more), id, phase, age, more };
  }, (one, flight) => {
    say(one.id, flight.id);
    one.id.title = flight.id;
    say(one.phase, words(flight.phase));
    say(one.age, seconds(flight.age_s));
    const said = isRouter ? [flight.node || "–"] : [flight.prompt_tokens, flight.cached_tokens, flight.generated_tokens].map(count);
    said.forEach((text, i) => say(one.more[i], text));
  });
  show($("flights-table"), oldest.length > 0);
  show($("flights-none"), oldest.length === 0);
}

const NODE_STATES = { usable: "ok", full: "mid", draining: "mid", resting: "off", unproven: "off" };

function drawFleet(fleet) {
  list($("nodes"), fleet.nodes, (node) => node.name, (node) => {
    const name = make("th", "", node.name), role = make("td"), stateCell = make("td"), mark = make("span", "state");
    name.scope = "row";
    stateCell.append(mark);
    const numbers = Array.from({ length: 7 }, () => make("td", "n"));
    return { element: row(name, role, stateCell, ...numbers), name, role, mark, numbers };
  }, (one, node) => {
    one.name.title = node.url;
    say(one.role, node.role);
    say(one.mark, node.state);
    one.mark.className = "state " + (NODE_STATES[node.state] || "mid");
    const said = [
      count(node.running), count(node.waiting), count(node.free_slots), count(node.requests_of_this_router),
      tokensPerSecond(node.prefill_tokens_per_s), tokensPerSecond(node.decode_tokens_per_s), seconds(Math.round(node.lease_left_s * 10) / 10),
    ];
    said.forEach((text, i) => say(one.numbers[i], text));
  });
  show($("nodes-none"), fleet.nodes.length === 0);
}

function drawEvents(now) {
  list($("events"), now.events, (event) => event.number + " " + event.at_s, (event) => {
    const time = make("td"), stamp = make("time", "", clock(event.at_s));
    stamp.dateTime = new Date(event.at_s * 1000).toISOString();
    time.append(stamp);
    const facts = Object.entries(event.facts).map(([name, value]) => `${name} ${value}`).join(", ");
    return { element: row(time, make("td", "", words(event.kind)), make("td", "facts", facts)) };
  }, () => {});
  show($("events-none"), now.events.length === 0);
}

look();
