// The page of a cluster: one stream of differences in, tables out. All text goes through textContent.
"use strict";

const NUM_REQUESTS = 100;
const RETRY_MS = 2000;
const SPOKEN_EVERY_MS = 15000;
const PAGE_STATES = ["owned", "published", "cached", "draining", "free"];
const SPAN_PHASES = ["gate", "fetch", "compute", "generate", "lost", "between"];

const parts = new Map(); // of the state, by name
const before = new Map(); // worker or tier → its counts and their time, for rates
const rates = new Map();
let requests = []; // newest first
let key = "";
let isPaused = false;
let lastEvent = 0;
let spoken = { text: "", at: 0 };

const $ = (id) => document.getElementById(id);

function make(tag, text = "", kind = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// ---- numbers

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const number = (value) => (value === undefined || value === null ? "-" : whole.format(value));
const share = (part, all) => (all ? `${Math.round((100 * part) / all)} %` : "-");
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

function bytes(count) {
  if (count === undefined || Number.isNaN(count)) return "-";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
  return `${short.format(count)} ${units[at]}`;
}

function noteRate(name, counts, at) {
  const old = before.get(name);
  if (old && at > old.at) {
    const found = {};
    for (const [count, value] of Object.entries(counts)) {
      found[count] = Math.max(0, value - (old.counts[count] ?? value)) / (at - old.at);
    }
    rates.set(name, found);
  }
  before.set(name, { counts, at });
}

// ---- tables: rows by key, cells changed only where their text changed

function head(table, columns) {
  if (table.tHead) return;
  const row = table.createTHead().insertRow();
  for (const [title, kind] of columns) {
    const cell = make("th", title, kind === "number" ? "number" : "");
    cell.scope = "col";
    row.append(cell);
  }
  table.append(document.createElement("tbody"));
}

function fill(table, columns, rows) {
  head(table, columns);
  const body = table.tBodies[0];
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  rows.forEach(([name, cells], place) => {
    let row = known.get(name);
    known.delete(name);
    if (!row) {
      row = document.createElement("tr");
      row.dataset.key = name;
      columns.forEach(([, kind], column) => {
        const cell = make(column ? "td" : "th", "", kind ?? "");
        if (!column) cell.scope = "row";
        row.append(cell);
      });
    }
    if (body.rows[place] !== row) body.insertBefore(row, body.rows[place] ?? null);
    cells.forEach((value, column) => put(row.cells[column], value));
  });
  for (const row of known.values()) row.remove();
}

function put(cell, value) {
  if (value && value.draw) {
    if (cell.dataset.drawn === value.text) return;
    cell.dataset.drawn = value.text;
    cell.replaceChildren(...value.draw());
  } else {
    const isBad = Boolean(value && value.bad);
    say(cell, isBad ? value.bad : String(value ?? ""));
    cell.classList.toggle("bad", isBad);
  }
}

const bad = (text) => ({ bad: text });

function bar(pieces, text) {
  return {
    text,
    draw() {
      const drawn = make("div", "", "bar");
      drawn.setAttribute("aria-hidden", "true");
      for (const [kind, left, width] of pieces.filter(([, , size]) => size > 0)) {
        const piece = make("i", "", kind);
        piece.style.left = `${left}%`;
        piece.style.width = `${Math.max(0, Math.min(width, 100 - left))}%`;
        drawn.append(piece);
      }
      return [drawn, make("span", text, "unseen")];
    },
  };
}

function pagesBar(pages) {
  if (!pages || !pages.total) return "-";
  let left = 0;
  const pieces = PAGE_STATES.map((state) => {
    const width = (100 * pages[state]) / pages.total;
    const piece = [state, left, width];
    left += width;
    return piece;
  });
  return bar(pieces, PAGE_STATES.map((state) => `${state} ${pages[state]}`).join(", "));
}

function legend(element, kinds) {
  element.replaceChildren(...kinds.map((kind) => {
    const shown = make("span");
    const box = make("i", "", kind);
    box.setAttribute("aria-hidden", "true");
    shown.append(box, kind);
    return shown;
  }));
}

// ---- the cluster

const named = (kind) => [...parts].filter(([name]) => name.startsWith(`${kind}/`))
  .map(([name, part]) => [name.slice(kind.length + 1), part])
  .sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));

function drawCluster() {
  const cluster = parts.get("cluster") ?? {};
  const workers = named("worker").sort(([, a], [, b]) => (b.role ?? "").localeCompare(a.role ?? ""));
  const nodes = named("node");
  say($("model"), cluster.model ?? "");
  drawWay(cluster, nodes);
  drawWorkers(workers);
  drawNodes(nodes, workers);
  drawTiers();
  const problems = parts.get("problems") ?? [];
  $("trouble").hidden = !problems.length;
  list($("problems"), problems);
  list($("events"), (parts.get("events") ?? []).slice().reverse().map((one) => `${clock(one.at_s)} ${one.text}`));
  drawLink(cluster, workers, problems);
}

function list(element, texts) {
  const joined = texts.join("\n");
  if (element.dataset.drawn === joined) return;
  element.dataset.drawn = joined;
  element.replaceChildren(...texts.map((text) => make("li", text)));
}

function drawLink(cluster, workers, problems) {
  const error = (parts.get("link") ?? {}).error;
  $("link").dataset.state = error ? "off" : "on";
  const text = error
    ? `the router does not answer: ${error}`
    : `live: ${workers.length} workers, ${number(cluster.num_running)} running, ${number(cluster.num_queued)} waiting`;
  say($("link"), text);
  const told = error || problems.length ? `${error || `${problems.length} problems: ${problems[0]}`}` : text;
  const now = Date.now();
  if (told !== spoken.text && now - spoken.at > SPOKEN_EVERY_MS) {
    say($("told"), told);
    spoken = { text: told, at: now };
  }
}

function drawWay(cluster, nodes) {
  const pool = (role) => parts.get(`pool/${role}`) ?? {};
  const holds = nodes.reduce((sum, [, node]) => sum + (node.counts.holds ?? 0), 0);
  const cache = parts.get("cache") ?? { queries: 0, hits: {} };
  const hit = Object.values(cache.hits).reduce((sum, tokens) => sum + tokens, 0);
  const tiers = Object.entries(cache.hits).map(([tier, tokens]) => `${tier} ${share(tokens, cache.queries)}`).join(", ");
  const ready = (role) => `${number(pool(role).num_ready)} of ${number(pool(role).size)}`;
  const sized = (role) => [pool(role).limit, pool(role).last_order].filter(Boolean).join("; ");
  const boxes = [
    ["Waiting for a first token", number(cluster.num_queued), "requests", ""],
    ["Prefill workers ready", ready("prefill"), sized("prefill"), "moves"],
    ["Prompts held for decode", number(holds), nodes.length === 1 ? "on 1 node" : `on ${nodes.length} nodes`, "moves"],
    ["Decode workers ready", ready("decode"), sized("decode"), "moves"],
    ["Streaming", number(cluster.num_running), "requests", "moves"],
    ["Prompt tokens found cached", share(hit, cache.queries), tiers, ""],
  ];
  if (!$("way").children.length) {
    $("way").replaceChildren(...boxes.map(([title, , , kind]) => {
      const box = make("div", "", kind);
      const value = make("dd");
      value.append(make("span"), make("small"));
      box.append(make("dt", title), value);
      return box;
    }));
  }
  boxes.forEach(([, value, note], place) => {
    const shown = $("way").children[place].lastChild;
    say(shown.firstChild, value);
    say(shown.lastChild, note);
  });
}

function drawWorkers(workers) {
  const columns = [["worker"], ["role"], ["node"], ["state"], ["running", "number"], ["waiting", "number"],
    ["preempted", "number"], ["tokens/s", "number"], ["hits", "number"], ["pages in use", "number"], ["pages by state", "wide"],
    ["memory", "number"], ["silent s", "number"]];
  fill($("workers"), columns, workers.map(([name, worker]) => {
    const { pages } = worker;
    const speed = rates.get(`worker/${name}`);
    const computed = worker.computed_prompt_tokens + worker.cached_prompt_tokens;
    const state = worker.state || "no answer";
    const isSilent = worker.silent_s >= 5;
    return [name, [name, worker.role, nodeName(worker.node_id), state === "ready" ? state : bad(state),
      number(worker.num_running), number(worker.num_waiting), number(worker.num_preemptions),
      speed ? number(speed.tokens) : "-", share(worker.cached_prompt_tokens, computed),
      pages ? share(pages.total - pages.free - pages.cached, pages.total) : "-", pagesBar(pages),
      bytes(worker.memory_bytes), isSilent ? bad(number(worker.silent_s)) : number(worker.silent_s)]];
  }));
}

// An arena's id is its node's name, and for a KV layout that a roll brought a tag behind #.
function nodeName(id) {
  return id.split("#")[0];
}

function drawNodes(nodes, workers) {
  const columns = [["node"], ["workers", "number"], ["arena", "number"], ["in use", "number"], ["slots by state", "wide"],
    ["holds", "number"], ["being read", "number"]];
  fill($("nodes"), columns, nodes.map(([name, { pages, block_bytes: size, counts }]) => [name, [
    nodeName(name) || "this machine", number(workers.filter(([, worker]) => worker.node_id === name).length), bytes(pages.total * size),
    share(pages.total - pages.free - pages.cached, pages.total), pagesBar(pages), number(counts.holds), number(counts.leases)]]));
}

function drawTiers() {
  const columns = [["tier"], ["state"], ["KV there or moved", "number"], ["hits", "number"], ["misses", "number"], ["hit rate", "number"],
    ["hits/s", "number"], ["read/s", "number"], ["written", "number"], ["refused", "number"], ["errors", "number"]];
  const size = (parts.get("tier/host") ?? {}).block_bytes ?? 0;
  const cache = parts.get("cache") ?? { queries: 0, hits: {} };
  fill($("tiers"), columns, named("tier").map(([name, { state, counts, pages }]) => {
    const speed = rates.get(`tier/${name}`);
    if (name === "host") {
      const held = (pages.total - pages.free) * size;
      const tokens = cache.hits.host ?? 0;
      return [name, [name, pages.total ? "up" : bad("no answer"), bytes(held), `${number(tokens)} tokens`, "-",
        share(tokens, cache.queries), "-", "-", "-", "-", "-"]];
    }
    const isOff = !state || state === "off";
    const asked = counts.hits + counts.misses;
    const errors = (counts.errors ?? 0) + (counts.corrupt ?? 0) + (counts.forged ?? 0) + (counts.write_errors ?? 0);
    return [name, [name, isOff || state === "up" ? state || "-" : bad(state), isOff ? "-" : bytes((counts.hits + counts.written) * size),
      number(counts.hits), number(counts.misses), share(counts.hits, asked), speed && !isOff ? short.format(speed.hits) : "-",
      speed && !isOff ? bytes(speed.hits * size) : "-", number(counts.written), counts.refused ? bad(number(counts.refused)) : number(counts.refused),
      errors ? bad(number(errors)) : number(errors)]];
  }));
}

// ---- requests

const phaseOf = ([, , , , , error, phase]) => (error ? "lost" : phase);

function waterfall(request) {
  const total = request.total_ms || 1;
  const text = request.causes.join("; ") || "no step took long";
  const spans = request.spans.map((span) => [phaseOf(span), (100 * span[2]) / total, (100 * span[3]) / total]);
  return { ...bar(spans, text), text: `${request.number} ${text}` };
}

const isWell = (request) => request.outcome === "OK";
const outcome = (request) => (isWell(request) ? "OK" : bad([request.reason || request.outcome, request.message].filter(Boolean).join(": ")));

function drawRequests() {
  const columns = [["request"], ["tenant"], ["ended"], ["outcome", "text"], ["tokens in, out", "number"], ["first token ms", "number"],
    ["took ms", "number"], ["prefill → decode"], ["waterfall", "wide"], ["most of its time", "text"]];
  fill($("requests"), columns, requests.map((request) => [String(request.number), [
    opener(request), request.tenant, clock(request.ended_s), outcome(request), `${number(request.prompt_tokens)}, ${number(request.output_tokens)}`,
    request.ttft_ms === null ? "-" : short.format(request.ttft_ms), short.format(request.total_ms),
    `${request.prefill || "-"} → ${request.decode || "-"}`, waterfall(request), request.causes[0] ?? ""]]));
  const moves = new Map();
  for (const { prefill, decode } of requests) {
    if (prefill && decode) moves.set(`${prefill} → ${decode}`, (moves.get(`${prefill} → ${decode}`) ?? 0) + 1);
  }
  const rows = [...moves].sort(([, a], [, b]) => b - a).slice(0, 20);
  fill($("moves"), [["from prefill to decode"], ["requests", "number"]], rows.map(([name, count]) => [name, [name, number(count)]]));
}

function opener(request) {
  return {
    text: `${request.number} ${request.request_id}`,
    draw() {
      const button = make("button", request.request_id);
      button.type = "button";
      button.addEventListener("click", () => showOne(request));
      return [button];
    },
  };
}

function showOne(request) {
  const shown = outcome(request);
  say($("h-one"), `Request ${request.request_id}`);
  const cached = Object.entries(request.cached).map(([tier, tokens]) => `${tokens} from ${tier}`).join(", ") || "none cached";
  say($("one-end"), `${shown.bad ?? shown}; ${request.prompt_tokens} prompt tokens (${cached}), ${request.output_tokens} generated, `
    + `${short.format(request.total_ms)} ms, attempts: ${request.attempts}`);
  list($("one-causes"), [...request.causes, ...(request.otherwise ?? [])]);
  const columns = [["step"], ["worker"], ["at ms", "number"], ["took ms", "number"], ["counts", "text"], ["waterfall", "wide"]];
  const total = request.total_ms || 1;
  $("one-steps").tBodies[0]?.replaceChildren();
  fill($("one-steps"), columns, request.spans.map((span, place) => {
    const [name, worker, start, took, counts, error] = span;
    const told = Object.entries(counts).sort().map(([what, count]) => `${what.replaceAll("_", " ")} ${count}`).join(", ");
    return [String(place), [name, worker, short.format(start), short.format(took), error ? bad(`${error} ${told}`) : told,
      bar([[phaseOf(span), (100 * start) / total, (100 * took) / total]], "")]];
  }));
  $("one").hidden = false;
  $("one").focus();
  $("one").scrollIntoView({ block: "nearest" });
}

async function find(id) {
  const known = requests.find((request) => request.request_id === id);
  say($("found"), known ? "" : "looking …");
  if (known) return showOne(known);
  try {
    const answer = await fetch(`/ui/requests/${encodeURIComponent(id)}`, { headers: { authorization: `Bearer ${key}` } });
    const told = await answer.json();
    say($("found"), answer.ok ? "" : told.error.message);
    if (answer.ok) showOne(told.requests.at(-1));
  } catch (error) {
    say($("found"), `the gateway does not answer: ${error.message}`);
  }
}

// ---- the stream

function take(event) {
  if (event.is_whole) { parts.clear(); requests = []; }
  for (const [name, part] of Object.entries(event.parts)) {
    if (part === null) { parts.delete(name); rates.delete(name); before.delete(name); } else parts.set(name, part);
  }
  for (const [name, part] of parts) {
    if (name.startsWith("tier/")) noteRate(name, part.counts, event.at_s);
    if (name.startsWith("worker/") && part.generated_tokens !== undefined) {
      noteRate(name, { tokens: part.generated_tokens + part.computed_prompt_tokens }, event.at_s);
    }
  }
  requests = [...event.requests.toReversed(), ...requests].slice(0, NUM_REQUESTS);
  lastEvent = event.at_s;
  if (!isPaused) draw(event.is_whole || event.requests.length > 0);
  else drawLink(parts.get("cluster") ?? {}, named("worker"), parts.get("problems") ?? []);
}

function draw(hasRequests) {
  drawCluster();
  const isRead = $("requests").contains(document.activeElement); // a row under the keyboard stays where it is
  if (hasRequests && !isRead) drawRequests();
  document.documentElement.dataset.shown = String(lastEvent);
}

async function read(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const told = JSON.parse(event.slice("data: ".length));
      if (told.error) throw new Error(told.error.message);
      take(told);
    }
  }
}

async function follow() {
  for (;;) {
    let pause = 0;
    try {
      const answer = await fetch("/ui/events", { headers: { authorization: `Bearer ${key}` }, cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) return refuse((await answer.json()).error.message);
      if (!answer.ok) throw new Error((await answer.json()).error.message);
      $("door").hidden = true;
      $("cluster").hidden = false;
      await read(answer.body);
    } catch (error) {
      $("link").dataset.state = "off";
      say($("link"), `not connected: ${error.message}`);
      if (!$("door").hidden) say($("refusal"), error.message);
      pause = RETRY_MS;
    }
    await new Promise((resolve) => { setTimeout(resolve, pause); });
  }
}

function refuse(message) {
  key = "";
  $("cluster").hidden = true;
  $("door").hidden = false;
  $("link").dataset.state = "off";
  say($("link"), "not connected");
  say($("refusal"), message);
  $("key").focus();
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = $("key").value.trim();
  $("key").value = "";
  if (!/^[!-~]+$/.test(given)) return refuse("a key has printable characters only");
  const isFollowed = key !== "";
  key = given;
  say($("refusal"), "");
  if (!isFollowed) follow();
});
$("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = $("id").value.trim();
  if (id) find(id);
});
$("one-close").addEventListener("click", () => { $("one").hidden = true; $("id").focus(); });
$("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  $("pause").setAttribute("aria-pressed", String(isPaused));
  if (!isPaused && lastEvent) draw(true);
});
$("scheme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.style.colorScheme ? root.style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.style.colorScheme = isDark ? "light" : "dark";
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("one").hidden) $("one-close").click();
});
legend($("pages-legend"), PAGE_STATES);
legend($("spans-legend"), SPAN_PHASES);
