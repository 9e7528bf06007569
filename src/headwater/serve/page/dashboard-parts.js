// What the dashboard is made of: numbers in words, elements that are updated in place, series over time and their plots.
//
// Text from outside (names, ids, events) is only ever set as text, never as markup. Elements are updated in place, so that
// whoever has the focus, or reads, is not disturbed each second. Series over time are kept here and nowhere else.
"use strict";

const BIN_S = 5, NUM_BINS = 60; // of the plots
const GAP_S = 15; // between two documents: what was counted in between belongs to no bin
const SVG = "http://www.w3.org/2000/svg";

const $ = (id) => document.getElementById(id);

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
