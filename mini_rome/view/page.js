"use strict";
// Everything that comes from a run is text from an agent or its sandbox: it enters the page through textContent alone.

const ROW = 26, FIRST = 6000, MORE = 60000;
// What a terminal or a text engine would act on: controls, bidi and zero-width marks, tags, halves of a pair.
const ODD = new RegExp("[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e" +
  "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffc]|\\udb40[\\udc00-\\udfff]|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]", "g");
const KEYS = { "j k  or  ↓ ↑": "next, previous episode", "n p": "next, previous chunk", "← →": "previous, next token of the chunk",
  Enter: "go to the episode, where arrows in a box of text scroll it", "/": "filter by task", x: "clear the filters",
  c: "show or hide the curves", "?": "this", Esc: "leave a field, a box or this" };
const MARKS = { G: "G_k = gamma^(K-k) R: the chunk's share of the reward (eq. 7); the stripe at its left is blue above 0, orange below",
  "ρ_c": "π_θ / π_old, geometric mean over the chunk (eq. 8)", clipped: "failed, and its ratio above 1 counted as 1 (eq. 9)",
  "π_old/μ": "trainer against sampler, geometric mean over the chunk: what eq. 8 compares with H",
  masked: "out of the loss: π_old/μ above H (eq. 8); with a number, that share of its tokens",
  "expert prefix": "c*: done before the policy took over at p; context, and in no loss of the policy's own",
  imitated: "an expert's chunk in the imitation loss of this step (eq. 10): up to a fork that no rollout came through",
  malformed: "no call, or one that cannot be read", error: "the call or its execution failed (eq. 1)",
  irrelevant: "off the sub-task (eq. 2)", submit: "the agent said that it was done", version: "of the policy that wrote the chunk" };

const NARROW = matchMedia("(max-width: 820px)"); // the list stands above the episode then, as page.css has it

const $ = (id) => document.getElementById(id);
const state = { data: null, shown: [], open: null, at: -1, chunk: -1, token: -1 };

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

const number = (value, digits = 3) => typeof value === "number" ? value.toFixed(digits) : value ?? "–"; // "nan" and "inf" are text
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
  $("about").textContent = plain([...about, `gamma ${run.gamma}`, ...(run.H ? [`H ${run.H}`] : [])].join(" · "));
  for (const [stage, s] of Object.entries(run.success)) {
    const text = `${percent(s.rate)} [${(100 * s.low).toFixed(1)}, ${(100 * s.high).toFixed(1)}]`;
    make("b", "", text, make("span", "", `${stage}, K ${s.chunks.join(" ")}: `, $("success"))).title = `n = ${s.n}, 95 % Wilson interval`;
  }
  for (const note of run.notes) make("p", "", note, $("notes"));
  for (const [id, words] of [["keys", KEYS], ["marks", MARKS]]) {
    for (const [key, what] of Object.entries(words)) { make("dt", "", key, $(id)); make("dd", "", what, $(id)); }
  }
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

function chart(title, lines, last, top) { // lines: [{name, label, colour, points: [[step, value, low, high]], pale}]
  const width = 330, height = 150, left = 38, right = 8, up = 22, down = 22;
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
    svg("text", { x: labelled, y: 13, "text-anchor": "end" }, root, line.label).style.fill = line.colour;
    labelled -= line.label && 7 * line.label.length + 8;
    const path = svg("polyline", { points: line.points.map((p) => `${x(p[0])},${y(p[1])}`).join(" "), fill: "none", "stroke-width": 1.6 }, root);
    path.style.stroke = line.colour;
    if (line.pale) path.style.opacity = 0.45;
    for (const [step, value, low, high] of line.points) {
      if (low !== undefined) svg("line", { x1: x(step), x2: x(step), y1: y(low), y2: y(high) }, root).style.stroke = line.colour;
      const dot = svg("circle", { cx: x(step), cy: y(value), r: line.pale ? 1.6 : 2.6 }, root);
      dot.style.fill = line.colour;
      const interval = low === undefined ? "" : ` [${number(low)}, ${number(high)}]`;
      svg("title", {}, dot, `${line.name}, step ${step}: ${number(value)}${interval}. Click: episodes of this step`);
      dot.addEventListener("click", () => { $("step").value = step; filter(); });
    }
  }
}

function showCurves() {
  const rows = state.data.curve, variants = [...new Set(rows.map((row) => row[0]))];
  $("curves").hidden = !rows.length;
  $("curves").open = !NARROW.matches;
  if (!rows.length) return;
  const points = (variant, metric) => rows.filter((row) => row[0] === variant && row[2] === metric).map((row) => [row[1], row[3]]).sort((a, b) => a[0] - b[0]);
  const last = Math.max(1, ...rows.map((row) => row[1])), success = [], start = [], norm = [];
  variants.forEach((variant, index) => {
    const colour = COLOURS[index % COLOURS.length], label = variants.length > 1 ? variant : "", n = new Map(points(variant, "test_n"));
    const tested = points(variant, "test_success").map(([step, rate]) => [step, rate, ...wilson(rate * n.get(step), n.get(step))]);
    const line = (name, points, label, pale) => ({ name: `${label} ${name}`.trim(), label, colour, points, pale });
    success.push(line("train", points(variant, "train_success"), "", true), line("test", tested, label));
    start.push(line("start position", points(variant, "start_position"), label));
    norm.push(line("gradient norm", points(variant, "grad_norm"), label));
  });
  for (const [title, lines, top] of [["Success: test, pale: train", success, 1], ["Start position p", start], ["Gradient norm", norm]]) {
    if (lines.some((line) => line.points.length)) chart(title, lines.filter((line) => line.points.length), last, top);
  }
}

// Filters and list

const stage = (episode) => `${episode.stage} ${episode.split}`.trim();
const won = (episode) => episode.reward === null ? "unscored" : episode.reward === 1 ? "yes" : "no";

function fill(id, values, text = (value) => value) {
  for (const value of ["", ...values]) make("option", "", value === "" ? "all" : text(value), $(id)).value = value;
}

function showFilters() {
  const of = (key) => [...new Set(state.data.episodes.map(key))].filter((value) => value !== "");
  fill("stage", of(stage));
  fill("start", of((e) => e.start).sort((a, b) => a - b));
  fill("won", ["yes", "no", "unscored"].filter((value) => state.data.episodes.some((e) => won(e) === value)));
  fill("ending", of((e) => e.ending));
  $("filters").addEventListener("input", filter);
  $("filters").addEventListener("submit", (event) => event.preventDefault());
}

function wanted() {
  const value = (id) => $(id).value.trim(), task = value("task").toLowerCase(), range = value("step").match(/^(\d+)(?:\s*-\s*(\d+))?$/);
  const [low, high] = range ? [Number(range[1]), Number(range[2] ?? range[1])] : [0, Infinity];
  return (e) => e.task.toLowerCase().includes(task) && (!value("stage") || stage(e) === value("stage")) &&
    (!value("start") || e.start === Number(value("start"))) && (!value("won") || won(e) === value("won")) &&
    (!value("ending") || e.ending === value("ending")) && (!range || (e.step !== null && e.step >= low && e.step <= high));
}

function filter() {
  const all = state.data.episodes;
  state.shown = all.filter(wanted());
  state.at = state.shown.indexOf(state.open); // -1: still in view, but not in the list
  const scored = state.shown.filter((e) => e.reward !== null), good = scored.filter((e) => e.reward === 1).length;
  const [low, high] = wilson(good, scored.length);
  const rate = scored.length && new Set(scored.map(stage)).size === 1 ? `, success ${percent(good / scored.length)} [${(100 * low).toFixed(1)}, ${(100 * high).toFixed(1)}]` : "";
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
    row.id = `row${first + offset}`;
    make("span", kind === "yes" ? "won" : kind === "no" ? "lost" : "dim", { yes: "✓", no: "✗", unscored: "?" }[kind], row);
    for (const text of [e.stage || e.split, e.step ?? "", e.task, `${e.start} / ${e.chunks.length}`, e.ending]) make("span", "", text, row).title = plain(text);
    return row;
  }));
}

function open(at) {
  if (at < 0 || at >= state.shown.length) return;
  Object.assign(state, { at, open: state.shown[at], chunk: -1, token: -1 });
  point(null);
  const top = at * ROW, list = $("list");
  if (top < list.scrollTop || top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top - list.clientHeight / 2;
  showRows();
  list.setAttribute("aria-activedescendant", `row${at}`);
  showEpisode(state.open);
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
    `start p = ${e.start}`, e.policy && `written by ${e.policy}`, !e.trained && e.stage && "not trained on: G by eq. 7",
    e.contexts > 1 && `the first of its ${e.contexts} contexts`];
  make("span", "dim", words.filter(Boolean).join(" · "), facts);
  block("", e.instruction, root);
  const legend = make("div", "legend", null, root), key = make("span", "", "G_k: −1 ", legend);
  make("span", "scale", null, key);
  key.append(" +1");
  if (e.start) make("span", "prefix", "shaded: expert prefix", legend);
  make("span", "", "tokens: the stronger the line, the less likely under μ (hover, or n then → for numbers)", legend);
  make("span", "", "? says what the marks mean", legend);
  if (!e.chunks.length) make("p", "dim", "No chunk: the episode ended before the first response.", root);
  e.chunks.forEach((chunk, index) => {
    if (index === e.start && e.imitated) showImitated(e, root);
    showChunk(e, chunk, index, root);
  });
}

function card(expert, number, root) { // [the body, a writer of its badges, a writer of its values]
  const article = make("article", expert ? "chunk expert" : "chunk", null, root);
  make("div", "strip", null, article);
  const body = make("div", "", null, article), facts = make("div", "facts", null, body);
  make("b", "", `c${expert ? "*" : ""}${number + 1}`, facts);
  const write = (kind, mark, text = mark) => { make("span", kind, text, facts).title = Object.hasOwn(MARKS, mark) ? MARKS[mark] : ""; };
  return [body, (mark, kind = "", text = mark) => write(`badge ${kind}`, mark, text), (mark, text, kind = "") => write(`value ${kind}`, mark, text)];
}

function showImitated(e, root) { // the expert's own chunk at a fork that no rollout came through
  const [body, badge] = card(true, e.start, root);
  badge("imitated", "good");
  make("span", "dim", "the expert's chunk here, in the loss of this step (eq. 10) but not in this episode", body.firstChild);
  block("", e.imitated, body);
}

function showChunk(e, chunk, index, root) {
  const [body, badge, value] = card(chunk.expert, index, root);
  body.parentNode.dataset.index = index;
  body.parentNode.firstChild.style.background = colour(chunk.G);
  if (chunk.expert) badge("expert prefix");
  if (chunk.expert && e.imitated) badge("imitated", "good");
  if (chunk.G !== undefined) value("G", `G ${number(chunk.G)}`, "G");
  if (chunk.rho !== undefined) value("ρ_c", `ρ_c ${number(chunk.rho)}`, "rho");
  if (chunk.mismatch !== undefined) value("π_old/μ", `π_old/μ ${number(chunk.mismatch)}`, "mismatch");
  if (chunk.masked) badge("masked", "warn", chunk.masked < 1 ? `masked ${percent(chunk.masked)}` : "masked");
  if (chunk.clipped) badge("clipped", "warn");
  for (const flag of ["malformed", "error", "irrelevant"]) if (chunk[flag]) badge(flag, "bad");
  for (const reason of chunk.reasons || []) badge(reason, "warn");
  if (chunk.submitted) badge("submit");
  if (chunk.status) badge(chunk.status, "bad");
  if (chunk.commands) badge(`exit ${chunk.exit_code ?? "–"}`, chunk.exit_code ? "bad" : "");
  if (chunk.wall_s) value("", `${chunk.wall_s} s`);
  if (chunk.policy_version) value("version", `version ${chunk.policy_version}`);
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
    if (typeof mu === "number") token.style.borderBottomColor = `color-mix(in srgb, var(--bad) ${Math.round(100 * Math.min(1, -mu / 3))}%, transparent)`;
  });
}

const ratio = (above, below) => typeof above === "number" && typeof below === "number" ? Math.exp(above - below).toFixed(4) : "–";

function tokenFacts(chunk, place) {
  const text = state.data.vocabulary[chunk.ids[place]], mu = chunk.mu?.[place], old = chunk.old?.[place], now = chunk.new?.[place];
  const lines = [`token ${chunk.ids[place]}${text === undefined ? "" : `  ${JSON.stringify(text)}`}`];
  if (mu === undefined) lines.push("not sampled: the expert's");
  else lines.push(`log μ       ${number(mu, 5)}  (p ${typeof mu === "number" ? Math.exp(mu).toPrecision(3) : "–"})`);
  if (old !== undefined) lines.push(`log π_old   ${number(old, 5)}`, `π_old / μ   ${ratio(old, mu)}`);
  if (now !== undefined) lines.push(`log π_θ     ${number(now, 5)}`, `π_θ / π_old ${ratio(now, old)}`);
  return lines.join("\n");
}

function point(token) {
  document.querySelector(".tok.current")?.classList.remove("current");
  $("tip").hidden = !token;
  if (!token) return;
  token.classList.add("current");
  const chunk = state.open.chunks[token.closest(".chunk").dataset.index], box = token.getBoundingClientRect(), tip = $("tip");
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

function toEpisode() {
  $("episode").focus({ preventScroll: true });
  $("episode").scrollIntoView();
}

function clear() {
  $("filters").reset();
  filter();
}

const ACTIONS = {
  j: () => open(state.at + 1), k: () => open(state.at - 1), ArrowDown: () => open(state.at + 1), ArrowUp: () => open(state.at - 1),
  n: () => toChunk(1), p: () => toChunk(-1), ArrowRight: () => toToken(1), ArrowLeft: () => toToken(-1), "/": () => $("task").focus(),
  Enter: toEpisode, x: clear, c: () => { $("curves").open = !$("curves").open; showRows(); }, "?": () => $("help").showModal(), Escape: () => point(null),
};

function listen() {
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select")) {
      if (event.key === "Escape" || event.key === "Enter") { event.target.blur(); event.preventDefault(); }
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open || !Object.hasOwn(ACTIONS, event.key)) return;
    // A dialog that was just closed may keep the focus until the next frame: its button is no longer one to press.
    if (event.key === "Enter" ? event.target.closest("button, summary")?.checkVisibility() : event.key.startsWith("Arrow") && event.target.closest("pre")) return;
    event.preventDefault();
    ACTIONS[event.key]();
  });
  $("list").addEventListener("scroll", showRows);
  $("list").addEventListener("click", (event) => { const row = event.target.closest(".row"); if (row) { open(Number(row.dataset.at)); if (NARROW.matches) toEpisode(); } });
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

begin().catch((error) => make("p", "", `This page cannot be shown here (${error}). It needs a browser of 2023 or newer.`, $("notes")));
