// What a state document looks like: each part of the page, filled from it. Asks nobody; `revive` is in dashboard.js.
"use strict";

let state = null; // the newest document

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
