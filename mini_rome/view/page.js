"use strict";
// Everything that comes from a run is text from an agent or its sandbox: it enters the page through textContent alone.

const ROW = 26, FIRST = 6000, MORE = 60000;
// What a terminal or a text engine would act on: controls, bidi and zero-width marks, tags, halves of a pair.
const ODD = new RegExp("[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e" +
  "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffc]|\\udb40[\\udc00-\\udfff]|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]", "g");
const KEYS = [["j k  or  ↓ ↑", "next, previous episode"], ["n p", "next, previous chunk"], ["← →", "previous, next token of the chunk"],
  ["/", "filter by task"], ["x", "clear the filters"], ["c", "show or hide the curves"], ["?", "these keys"], ["Esc", "leave a field, close"]];

const $ = (id) => document.getElementById(id);
const state = { data: null, shown: [], at: -1, chunk: -1, token: -1 };

const CONTROLS = ("NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US").split(" ");

function picture(found) { // in letters: few fonts have the control pictures
  const code = found.codePointAt(0);
  return `⟨${CONTROLS[code] ?? (code === 0x7f ? "DEL" : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`)}⟩`;
}

const plain = (text) => String(text).replace(ODD, picture);

function make(tag, name, text, parent) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined && text !== null) element.textContent = plain(text);
  if (parent) parent.append(element);
  return element;
}

function visible(text, parent) { // as `plain`, each picture marked
  let from = 0;
  for (const match of text.matchAll(ODD)) {
    if (match.index > from) parent.append(text.slice(from, match.index));
    make("span", "ctl", null, parent).textContent = picture(match[0]);
    from = match.index + match[0].length;
  }
  if (from < text.length) parent.append(text.slice(from));
}

function block(name, text, parent) { // long text comes in parts
  const pre = make("pre", name, null, parent);
  let from = 0;
  const more = (size) => {
    let end = Math.min(text.length, from + size);
    if (end < text.length && /[\ud800-\udbff]/.test(text[end - 1])) end += 1;
    visible(text.slice(from, end), pre);
    from = end;
    if (from < text.length) {
      const button = make("button", "", `… ${text.length - from} more characters: show`, pre);
      button.addEventListener("click", () => { button.remove(); more(MORE); });
    }
  };
  more(FIRST);
  return pre;
}

const number = (value, digits = 3) => value === null || value === undefined ? "–" : value.toFixed(digits);
const percent = (value) => `${(100 * value).toFixed(1)} %`;

function wilson(won, n) { // 95 %
  if (!n) return [0, 1];
  const z = 1.959964, centre = (won + z * z / 2) / (n + z * z), half = z / (n + z * z) * Math.sqrt(won * (n - won) / n + z * z / 4);
  return [won ? centre - half : 0, won < n ? centre + half : 1];
}

// Head of the page

function showHead() {
  const run = state.data.run, simulated = run.backends.includes("sim");
  document.title = `${plain(run.name)}: mini-rome view`;
  $("name").textContent = plain(run.name);
  make("span", simulated ? "badge warn" : "badge", simulated ? "sandbox: simulated (sim)" : `sandbox: ${run.backends.join(", ")}`, $("backend"));
  const about = ["seed", "sampler", "commit", "time"].filter((key) => run[key] !== null).map((key) => `${key} ${run[key]}`);
  $("about").textContent = plain([...about, `gamma ${run.gamma}`].join(" · "));
  for (const [stage, s] of Object.entries(run.success)) {
    if (s.rate === null) continue;
    const text = `${percent(s.rate)} [${(100 * s.low).toFixed(1)}, ${(100 * s.high).toFixed(1)}]`;
    make("b", "", text, make("span", "", `${stage}, K ${s.chunks.join(" ")}: `, $("success"))).title = `n = ${s.n}, 95 % Wilson interval`;
  }
  for (const note of run.notes) make("p", "", note, $("notes"));
  for (const [key, what] of KEYS) { make("dt", "", key, $("keys")); make("dd", "", what, $("keys")); }
}

// Curves

const COLOURS = ["var(--good)", "var(--bad)", "#009e73", "#cc79a7"];

function svg(tag, attributes, parent, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = plain(text);
  if (parent) parent.append(element);
  return element;
}

function chart(title, lines, top) { // lines: [{label, colour, points: [[step, value, low, high]], dashed}]
  const width = 330, height = 150, left = 38, right = 8, up = 22, down = 22;
  const steps = lines.flatMap((line) => line.points.map((point) => point[0])), last = Math.max(1, ...steps);
  const most = top || Math.max(1e-9, ...lines.flatMap((line) => line.points.map((point) => point[1]))) * 1.05;
  const x = (step) => left + step / last * (width - left - right), y = (value) => height - down - value / most * (height - up - down);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title }, $("charts"));
  svg("text", { x: left, y: 13, class: "title" }, root, title);
  for (const part of [0, 0.5, 1]) {
    svg("line", { x1: left, x2: width - right, y1: y(part * most), y2: y(part * most), class: "grid" }, root);
    svg("text", { x: left - 5, y: y(part * most) + 4, "text-anchor": "end" }, root, Number((part * most).toPrecision(2)));
    svg("text", { x: x(part * last), y: height - 6, "text-anchor": part ? "end" : "start" }, root, part === 1 ? `step ${last}` : Math.round(part * last));
  }
  let labelled = width - right;
  for (const line of [...lines].reverse()) {
    const label = svg("text", { x: labelled, y: 13, "text-anchor": "end" }, root, line.label);
    label.style.fill = line.colour;
    labelled -= 7 * line.label.length + 8;
    const path = svg("polyline", { points: line.points.map((p) => `${x(p[0])},${y(p[1])}`).join(" "), fill: "none", "stroke-width": 1.6 }, root);
    path.style.stroke = line.colour;
    if (line.dashed) path.style.opacity = 0.45;
    for (const [step, value, low, high] of line.points) {
      if (low !== undefined) svg("line", { x1: x(step), x2: x(step), y1: y(low), y2: y(high) }, root).style.stroke = line.colour;
      const dot = svg("circle", { cx: x(step), cy: y(value), r: line.dashed ? 1.6 : 2.6 }, root);
      dot.style.fill = line.colour;
      const interval = low === undefined ? "" : ` [${number(low)}, ${number(high)}]`;
      svg("title", {}, dot, `${line.label}, step ${step}: ${number(value)}${interval}. Click: episodes of this step`);
      dot.addEventListener("click", () => { $("step").value = step; filter(); });
    }
  }
}

function showCurves() {
  const rows = state.data.curve, variants = [...new Set(rows.map((row) => row[0]))];
  $("curves").hidden = !rows.length;
  if (!rows.length) return;
  const points = (variant, metric) => rows.filter((row) => row[0] === variant && row[2] === metric).map((row) => [row[1], row[3]]).sort((a, b) => a[0] - b[0]);
  const some = variants.length > 1, success = [], start = [], norm = [];
  variants.forEach((variant, index) => {
    const colour = COLOURS[index % COLOURS.length], n = new Map(points(variant, "test_n")), name = (what) => some ? `${variant} ${what}` : what;
    const tested = points(variant, "test_success").map(([step, rate]) => [step, rate, ...wilson(rate * n.get(step), n.get(step))]);
    success.push({ label: name("train"), colour, points: points(variant, "train_success"), dashed: true }, { label: name("test"), colour, points: tested });
    start.push({ label: some ? variant : "", colour, points: points(variant, "start_position") });
    norm.push({ label: some ? variant : "", colour, points: points(variant, "grad_norm") });
  });
  chart("Success", success.filter((line) => line.points.length), 1);
  for (const [title, lines] of [["Start position p", start], ["Gradient norm", norm]]) {
    if (lines.some((line) => line.points.length)) chart(title, lines.filter((line) => line.points.length));
  }
}

// Filters and list

const won = (episode) => episode.reward === null ? "unscored" : episode.reward === 1 ? "yes" : "no";

function fill(id, values, text = (value) => value) {
  for (const value of ["", ...values]) make("option", "", value === "" ? "all" : text(value), $(id)).value = value;
}

function showFilters() {
  const of = (key) => [...new Set(state.data.episodes.map(key))].filter((value) => value !== "");
  fill("stage", of((e) => `${e.stage} ${e.split}`.trim()));
  fill("start", of((e) => e.start).sort((a, b) => a - b));
  fill("won", ["yes", "no", "unscored"].filter((value) => state.data.episodes.some((e) => won(e) === value)));
  fill("ending", of((e) => e.ending));
  $("filters").addEventListener("input", filter);
  $("filters").addEventListener("submit", (event) => event.preventDefault());
}

function wanted() {
  const value = (id) => $(id).value.trim(), task = value("task").toLowerCase(), range = value("step").match(/^(\d+)(?:\s*-\s*(\d+))?$/);
  const [low, high] = range ? [Number(range[1]), Number(range[2] ?? range[1])] : [0, Infinity];
  return (e) => e.task.toLowerCase().includes(task) && (!value("stage") || `${e.stage} ${e.split}`.trim() === value("stage")) &&
    (!value("start") || e.start === Number(value("start"))) && (!value("won") || won(e) === value("won")) &&
    (!value("ending") || e.ending === value("ending")) && (!range || (e.step !== null && e.step >= low && e.step <= high));
}

function filter() {
  const all = state.data.episodes, open = state.shown[state.at], keep = wanted();
  state.shown = all.filter(keep);
  state.at = state.shown.indexOf(open);
  const scored = state.shown.filter((e) => e.reward !== null), good = scored.filter((e) => e.reward === 1).length;
  const [low, high] = wilson(good, scored.length);
  const rate = scored.length ? `, success ${percent(good / scored.length)} [${(100 * low).toFixed(1)}, ${(100 * high).toFixed(1)}]` : "";
  $("count").textContent = `${state.shown.length} of ${all.length} episodes${rate}`;
  $("tall").style.height = `${state.shown.length * ROW}px`;
  $("list").scrollTop = 0;
  showRows();
}

function showRows() { // only those in sight
  const first = Math.max(0, Math.floor($("list").scrollTop / ROW) - 8), count = Math.ceil($("list").clientHeight / ROW) + 16;
  $("rows").style.top = `${first * ROW}px`;
  $("rows").replaceChildren(...state.shown.slice(first, first + count).map((e, offset) => {
    const row = make("div", "row"), kind = won(e);
    row.setAttribute("role", "option");
    row.setAttribute("aria-selected", String(first + offset === state.at));
    row.dataset.at = first + offset;
    make("span", kind === "yes" ? "won" : kind === "no" ? "lost" : "dim", { yes: "✓", no: "✗", unscored: "?" }[kind], row);
    for (const text of [e.stage || e.split, e.step ?? "", e.task, `${e.start} / ${e.chunks.length}`, e.ending]) make("span", "", text, row).title = plain(text);
    return row;
  }));
}

function open(at) {
  if (at < 0 || at >= state.shown.length) return;
  Object.assign(state, { at, chunk: -1, token: -1 });
  const top = at * ROW, list = $("list");
  if (top < list.scrollTop || top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top - list.clientHeight / 2;
  showRows();
  showEpisode(state.shown[at]);
}

// Episode

function colour(G) { // G_k: blue above 0, orange below, pale near it
  return G ? `color-mix(in srgb, var(${G > 0 ? "--good" : "--bad"}) ${Math.round(15 + 85 * Math.min(1, Math.abs(G)))}%, var(--soft))` : "";
}

function showEpisode(e) {
  const root = $("episode");
  root.replaceChildren();
  root.scrollTop = 0;
  make("h2", "", e.task, root);
  const facts = make("div", "facts", null, root), kind = won(e);
  make("span", `badge ${{ yes: "good", no: "bad", unscored: "warn" }[kind]}`, kind === "unscored" ? `unscored: ${e.reason || e.ending}` : `reward ${e.reward}: ${e.ending}`, facts);
  if (e.backend === "sim") make("span", "badge warn", "simulated", facts);
  const words = [e.stage && `stage ${e.stage}`, e.step !== null && `step ${e.step}`, `split ${e.split}`, `family ${e.family}`,
    `start p = ${e.start}`, e.policy && `written by ${e.policy}`, !e.trained && e.stage && "not trained on: G by eq. 7"];
  make("span", "dim", words.filter(Boolean).join(" · "), facts);
  block("", e.instruction, root);
  const legend = make("div", "legend", "G = −1", root);
  make("span", "scale", null, legend);
  legend.append("+1", " · tokens: the stronger the line, the less likely under μ (hover, or n then → for numbers)");
  e.chunks.forEach((chunk, index) => {
    if (index === e.start && e.imitated) showImitated(e, root);
    showChunk(e, chunk, index, root);
  });
}

function showImitated(e, root) { // the expert's own chunk at a fork that no rollout came through
  const card = make("article", "chunk expert", null, root);
  make("div", "strip", null, card);
  const body = make("div", "", null, card), facts = make("div", "facts", null, body);
  make("b", "", `c*${e.start + 1}`, facts);
  make("span", "badge good", "imitated", facts);
  make("span", "dim", "the expert's chunk here, in the loss of this step (eq. 10) but not in this episode", facts);
  block("", e.imitated, body);
}

function showChunk(e, chunk, index, root) {
  const card = make("article", chunk.expert ? "chunk expert" : "chunk", null, root);
  card.dataset.index = index;
  make("div", "strip", null, card).style.background = colour(chunk.G);
  const body = make("div", "", null, card), facts = make("div", "facts", null, body);
  make("b", "", chunk.expert ? `c*${index + 1}` : `c${index + 1}`, facts);
  const badge = (text, kind = "") => make("span", `badge ${kind}`, text, facts);
  if (chunk.expert) badge("expert prefix");
  if (chunk.expert && e.imitated) badge("imitated", "good");
  if (chunk.G !== undefined) make("span", "value G", `G ${number(chunk.G)}`, facts);
  if (chunk.rho !== undefined) make("span", "value rho", `ρ_c ${number(chunk.rho)}`, facts).title = "pi_theta / pi_old of the chunk (eq. 9)";
  if (chunk.mismatch !== undefined) make("span", "value mismatch", `π_old/μ ${number(chunk.mismatch)}`, facts).title = "what eq. 8 compares with H";
  if (chunk.masked) badge(chunk.masked < 1 ? `masked ${percent(chunk.masked)}` : "masked", "warn");
  if (chunk.clipped) badge("clipped", "warn");
  for (const flag of ["malformed", "error", "irrelevant"]) if (chunk[flag]) badge(flag, "bad");
  for (const reason of chunk.reasons || []) badge(reason, "warn");
  if (chunk.submitted) badge("submit");
  if (chunk.status) badge(chunk.status, "bad");
  if (chunk.commands) badge(`exit ${chunk.exit_code ?? "–"}`, chunk.exit_code ? "bad" : "");
  if (chunk.wall_s) make("span", "value", `${chunk.wall_s} s`, facts);
  if (chunk.policy_version) make("span", "value", `version ${chunk.policy_version}`, facts);
  for (const command of chunk.commands || []) block("command", command, body);
  if (chunk.ids) showTokens(chunk, index, body);
  else block("", chunk.text || "(empty response)", body);
  if (chunk.observation) block("observation", chunk.observation, body);
  for (const event of chunk.events || []) {
    const line = make("div", "event", `${event.kind} (${event.severity}, seen by ${event.source}, ${event.action}): `, body);
    visible(event.evidence, line);
  }
}

function showTokens(chunk, index, body) {
  const line = make("div", "tokens", null, body);
  chunk.ids.slice(0, MORE).forEach((id, place) => {
    const token = make("span", "tok", null, line), mu = chunk.mu?.[place];
    visible((state.data.vocabulary[id] ?? `⟨${id}⟩`).replace(/\n/g, "⏎"), token);
    token.dataset.place = place;
    if (mu !== undefined) token.style.borderBottomColor = `color-mix(in srgb, var(--bad) ${Math.round(100 * Math.min(1, -mu / 3))}%, transparent)`;
  });
}

function tokenFacts(chunk, place) {
  const text = state.data.vocabulary[chunk.ids[place]], mu = chunk.mu?.[place], old = chunk.old?.[place], now = chunk.new?.[place];
  const lines = [`token ${chunk.ids[place]}${text === undefined ? "" : `  ${JSON.stringify(text)}`}`];
  if (mu === undefined) lines.push("not sampled: the expert's");
  else lines.push(`log μ       ${number(mu, 4)}  (p ${number(Math.exp(mu))})`);
  if (typeof old === "number") lines.push(`log π_old   ${number(old, 4)}`, `π_old / μ   ${number(Math.exp(old - mu), 4)}`);
  if (typeof now === "number") lines.push(`log π_θ     ${number(now, 4)}`, `π_θ / π_old ${number(Math.exp(now - old), 4)}`);
  return lines.join("\n");
}

function point(token) {
  document.querySelector(".tok.current")?.classList.remove("current");
  $("tip").hidden = !token;
  if (!token) return;
  token.classList.add("current");
  const chunk = state.shown[state.at].chunks[token.closest(".chunk").dataset.index], box = token.getBoundingClientRect(), tip = $("tip");
  tip.textContent = plain(tokenFacts(chunk, Number(token.dataset.place)));
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${box.bottom + 6 + tip.offsetHeight > innerHeight ? box.top - tip.offsetHeight - 6 : box.bottom + 6}px`;
}

// Keys and mouse

function toChunk(by) {
  const cards = document.querySelectorAll(".chunk[data-index]");
  if (!cards.length) return;
  state.chunk = Math.max(0, Math.min(cards.length - 1, state.chunk + by));
  state.token = -1;
  document.querySelector(".chunk.current")?.classList.remove("current");
  cards[state.chunk].classList.add("current");
  cards[state.chunk].scrollIntoView({ block: "nearest" });
  point(null);
}

function toToken(by) {
  if (state.chunk < 0) toChunk(1);
  const tokens = document.querySelectorAll(".chunk.current .tok");
  state.token = Math.max(0, Math.min(tokens.length - 1, state.token + by));
  if (tokens.length) point(tokens[state.token]);
}

function clear() {
  $("filters").reset();
  filter();
}

const ACTIONS = {
  j: () => open(state.at + 1), k: () => open(state.at - 1), ArrowDown: () => open(state.at + 1), ArrowUp: () => open(state.at - 1),
  n: () => toChunk(1), p: () => toChunk(-1), ArrowRight: () => toToken(1), ArrowLeft: () => toToken(-1), "/": () => $("task").focus(),
  x: clear, c: () => { $("curves").open = !$("curves").open; showRows(); }, "?": () => $("help").showModal(), Escape: () => point(null),
};

function listen() {
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select")) {
      if (event.key === "Escape" || event.key === "Enter") { event.target.blur(); event.preventDefault(); }
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open || !(event.key in ACTIONS)) return;
    event.preventDefault();
    ACTIONS[event.key]();
  });
  $("list").addEventListener("scroll", showRows);
  $("list").addEventListener("click", (event) => { const row = event.target.closest(".row"); if (row) open(Number(row.dataset.at)); });
  $("episode").addEventListener("mouseover", (event) => point(event.target.closest(".tok")));
  $("episode").addEventListener("mouseleave", () => point(null));
  $("episode").addEventListener("scroll", () => point(null));
  $("help-button").addEventListener("click", () => $("help").showModal());
  $("curves").addEventListener("toggle", showRows);
  addEventListener("resize", showRows);
}

async function begin() {
  const bytes = Uint8Array.from(atob($("data").textContent), (c) => c.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  state.data = await new Response(unpacked).json();
  $("data").remove();
  showHead();
  showCurves();
  showFilters();
  filter();
  listen();
  open(0);
  document.body.dataset.ready = "yes";
}

begin();
