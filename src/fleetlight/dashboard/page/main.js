// SPDX-License-Identifier: Apache-2.0
// Receives what the server sends, keeps it, and draws at most once a frame.

import { fitCharts, setEvents, showChart } from "./charts.js";
import { endFeed, follow } from "./feed.js";
import { median, showHeat } from "./heat.js";
import { startLogs } from "./logs.js";
import { showTopology } from "./topology.js";
import { byId, bytes, clock, count, duration, fillTable, known, make, number, PART_COLOURS, percent, setText } from "./words.js";

const FEW = 6;
let job = null;
let behind = 0;
// why no metrics arrive; null while they do
let lost = null;
let isDue = false;
let isNew = false;
let hasBegun = false;
let hasDrawn = false;
const visible = new Set();

// The lines of news replace the end of those that are known.
function joined(old, news, first) {
  if (Array.isArray(news)) return [...(old || []).slice(0, first), ...news];
  const names = Object.keys(news);
  return Object.fromEntries(names.map((name) => {
    const before = (old || {})[name] || new Array(first).fill(null);
    return [name, joined(before, news[name], first)];
  }));
}

function receive(kind, message) {
  if (kind === "lost") {
    lost = message || "the page's server has ended or is out of reach; fleetlight dashboard LOGDIR shows the job";
    later();
    return;
  }
  behind = Date.now() / 1000 - message.now;
  if (kind === "whole") {
    job = message;
  } else {
    const { first, ...lines } = message.lines;
    for (const [name, news] of Object.entries(lines)) job.lines[name] = joined(job.lines[name], news, first);
    job = { ...job, ...message, lines: job.lines, events: [...job.events, ...message.events].slice(-500) };
  }
  job.events.sort((a, b) => a.at - b.at);
  lost = null;
  if (job.over) endFeed();
  renew();
}

function later() {
  if (isDue || document.hidden) return;
  isDue = true;
  requestAnimationFrame(() => { isDue = false; if (job) draw(); else if (lost) showState(lost, "warn"); });
}

// Draws what depends on metrics as well as on the time.
function renew() {
  isNew = true;
  later();
}

const now = () => (job.over ? job.now : Date.now() / 1000 - behind);
const ago = (at) => {
  const seconds = Math.max(0, now() - at);
  return known(at) ? `${seconds < 120 ? `${Math.round(seconds)} s` : duration(seconds)} ago` : "–";
};

function draw() {
  drawState();
  drawTiles();
  drawProcesses();
  if (!isNew) return;
  if (!hasBegun) {
    // charts take longer: the first metrics show without them
    hasBegun = true;
    later();
    return;
  }
  isNew = false;
  drawEvents();
  const sections = { steps: drawSteps, delay: drawDelay, tables: drawTables, logged: drawLogged, program: drawProgram };
  for (const [id, drawSection] of Object.entries(sections)) {
    if (!hasDrawn || visible.has(id) || byId(id).hidden) drawSection();
  }
  hasDrawn = true;
}

// Sections out of sight are drawn once, and again when they come into view.
function watchSections() {
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) visible.add(target.id); else visible.delete(target.id);
    }
    renew();
  });
  for (const section of document.querySelectorAll("section")) observer.observe(section);
}

function showState(text, tone) {
  setText(byId("state"), text);
  byId("state").className = tone;
}

function drawState() {
  const failed = job.processes.filter((row) => row.state === "failed" || row.state === "silent");
  setText(byId("job"), job.folder);
  document.title = `${job.folder} – Fleetlight`;
  let text = "running", tone = "good";
  if (job.over) {
    [text, tone] = job.code === 0 ? ["ended with code 0", "good"] : [`ended${known(job.code) ? ` with code ${job.code}` : ""}`, "bad"];
  } else if (lost) {
    [text, tone] = [lost, "warn"];
  } else if (failed.length) {
    // fleetrun ends the others by SIGTERM
    const first = failed.filter((row) => row.detail !== "killed by SIGTERM");
    const named = (first.length ? first : failed).slice(0, 3);
    [text, tone] = [named.map((row) => `${row.name}: ${row.detail || row.state}`).join("; "), "bad"];
  }
  showState(text, tone);
  const notice = byId("straggler"), slow = job.straggler;
  notice.hidden = !slow;
  if (slow) {
    const times = known(slow.times) ? `${number(slow.times)} times` : "many times";
    const others = slow.holds ? " The others wait for it." : "";
    setText(notice, `${slow.name} takes ${times} as long as the others: ${slow.part === "other" ? "the script itself" : slow.part} ${duration(slow.seconds)} a step, others ${duration(slow.others)}.${others}`);
  }
}

// Samples are counted by loaders; a script may have one of its own.
const hasSamples = () => job.lines.rate.some((value) => value > 0);

function drawTiles() {
  const running = job.processes.filter((row) => row.kind === "worker" && row.state === "running");
  const [what, key] = hasSamples() ? ["Samples", "rate"] : ["Steps", "pace"];
  const tiles = [
    [`${what} a second`, number(running.reduce((sum, row) => sum + (row[key] || 0), 0))],
    ["Step", count(Math.max(0, ...job.processes.map((row) => row.step || 0)))],
    ["Seconds a step, median", duration(median(job.processes.map((row) => row.step_s)))],
    ["Mean staleness", number(job.staleness.mean)],
    ["Prefetched rows", percent(job.hit)],
    ["Skipped steps", count(job.skipped)],
    ["Last checkpoint", ago(job.checkpoint)],
    ["Last publication", ago(job.publication)],
  ].filter(([, text], i) => i < 3 || (text !== "–" && !(i === 5 && text === "0")));
  const list = byId("tiles");
  while (list.children.length > tiles.length) list.lastChild.remove();
  tiles.forEach(([name, text], i) => {
    const tile = list.children[i] || list.appendChild(make("div", {}, make("dt"), make("dd")));
    setText(tile.firstChild, name);
    setText(tile.lastChild, text);
  });
}

const COLUMNS = [
  ["Process", (row) => row.name],
  ["State", (row) => [row.detail && row.state !== "running" ? `${row.state}: ${row.detail}` : row.state, `words ${row.state}`]],
  ["Host", (row) => [row.host || "–", "words"], "host"],
  ["PID", (row) => (row.pid ? String(row.pid) : "–")],
  ["Restarts", (row) => count(row.restarts)],
  ["Step", (row) => count(row.step), "step"],
  ["Last step", (row) => (row.kind === "worker" ? ago(row.stepped) : "–"), "stepped"],
  ["Last metrics", (row) => ago(row.seen)],
  ["Now in", (row) => [row.part || "–", "words"], "part"],
  ["A step", (row) => duration(row.step_s), "step_s"],
  ["Samples/s", (row) => number(row.rate), "rate"],
  ["Steps/s", (row) => number(row.pace), "pace"],
  ["Pushes/s", (row) => number(row.applied), "applied"],
  ["Queued", (row) => count(row.queued), "queued"],
  ["Prefetched", (row) => percent(row.hit), "hit"],
  ["Bytes/s", (row) => bytes((row.sent ?? row.host_sent ?? NaN) + (row.received ?? 0))],
  ["Cores", (row) => number(row.cores)],
  ["Memory", (row) => bytes(row.memory)],
  ["GPU", (row) => bytes(row.gpu), "gpu"],
  ["Journal", (row) => bytes(row.journal), "journal"],
  ["Snapshot", (row) => duration(row.snapshot_age), "snapshot_age"],
  ["Skipped", (row) => count(row.skipped), "skipped"],
  ["Reconnects", (row) => count(row.reconnects), "reconnects"],
];
const TEXTS = new Set(["State", "Host", "Now in"]);
const ONLY_IF_ANY = new Set(["rate", "skipped", "reconnects", "queued"]);

// Columns of which no process has a value are left out, and the host if there is one.
function isShown([, , key]) {
  const values = job.processes.map((row) => row[key]);
  if (key === "host") return new Set(values).size > 1;
  if (ONLY_IF_ANY.has(key)) return values.some((value) => value > 0);
  return !key || values.some((value) => known(value) || value);
}

function drawProcesses() {
  const slow = job.straggler && job.straggler.name;
  showTopology(job.processes, slow);
  const columns = COLUMNS.filter(isShown);
  const rows = job.processes.map((row) => {
    const cells = columns.map(([, say]) => say(row));
    cells.className = row.name === slow ? "slow" : "";
    return cells;
  });
  fillTable(byId("process-table"), columns.map(([name]) => [name, TEXTS.has(name) ? "words" : ""]), rows);
}

function drawSteps() {
  const workers = job.processes.filter((row) => row.parts);
  const most = Math.max(...workers.map((row) => row.step_s), 1e-9);
  const slow = job.straggler && job.straggler.name;
  const legend = byId("legend");
  if (!legend.children.length) {
    legend.append("Where the time of a step goes:");
    job.parts.forEach((part, i) => {
      const key = make("span", { className: "key" });
      key.style.background = PART_COLOURS[i];
      legend.append(key, part);
    });
  }
  const list = byId("splits");
  while (list.children.length > workers.length) list.lastChild.remove();
  workers.forEach((row, i) => drawSplit(list.children[i] || list.appendChild(newSplit()), row, most, row.name === slow));
  const { times, first } = shown();
  const lines = Object.entries(job.lines.step).sort(byWorker).map(([name, values]) => [name.replace(".", " "), values.slice(first)]);
  const [what, rate] = hasSamples() ? ["Samples", job.lines.rate] : ["Steps", job.lines.pace];
  setText(byId("rate-name"), `${what} a second, all workers`);
  showChart("chart-rate", `${what} a second`, times, [["all workers", rate.slice(first)]]);
  showChart("chart-step", "Seconds a step", times, few(lines, slow, ["slowest", "fastest"]), duration);
  showHeat(times, lines);
}

function newSplit() {
  const bar = make("span", { className: "bar" }, ...job.parts.map((part, i) => {
    const piece = make("span", { title: part });
    piece.style.background = PART_COLOURS[i];
    return piece;
  }));
  return make("div", { className: "split" }, make("span", { className: "name" }), bar, make("span", { className: "value" }));
}

function drawSplit(line, row, most, isSlow) {
  line.className = isSlow ? "split slow" : "split";
  setText(line.children[0], row.name);
  row.parts.forEach((seconds, i) => {
    const piece = line.children[1].children[i];
    piece.style.width = `${(100 * seconds / most).toFixed(2)}%`;
    piece.title = `${job.parts[i]} ${duration(seconds)}`;
  });
  setText(line.children[2], duration(row.step_s));
}

const byWorker = ([a], [b]) => a.length - b.length || (a < b ? -1 : 1);

// A few lines; of many workers the median, the extremes and the slow one.
function few(lines, slow, [most, least]) {
  if (lines.length <= FEW) return lines;
  const columns = lines[0][1].map((_, i) => lines.map(([, values]) => values[i]).filter(known));
  const found = [
    [most, columns.map((values) => (values.length ? Math.max(...values) : null))],
    ["median", columns.map((values) => median(values))],
    [least, columns.map((values) => (values.length ? Math.min(...values) : null))],
  ];
  const own = lines.find(([name]) => name === slow);
  return own ? [...found, own] : found;
}

// The times in the chosen range, and the place of the first.
function shown() {
  const seconds = Number(byId("range").value), all = job.lines.times;
  const start = seconds ? all[all.length - 1] - seconds : -Infinity;
  const first = Math.max(0, all.findIndex((at) => at >= start));
  return { times: all.slice(first), first };
}

function drawDelay() {
  const { times, first } = shown();
  const { bars, most } = job.staleness;
  const highest = Math.max(1, ...bars), list = byId("bars");
  while (list.children.length > bars.length) list.lastChild.remove();
  bars.forEach((value, i) => {
    const bar = list.children[i] || list.appendChild(make("div", {}, make("i"), make("span")));
    bar.firstChild.style.height = `${(125 * value / highest).toFixed(1)}px`;
    const isLast = i === bars.length - 1 && most > i;
    setText(bar.lastChild, `${i}${isLast ? "+" : ""}`);
    bar.title = `staleness ${i}${isLast ? " and more" : ""}: ${count(value)} pushes`;
  });
  list.parentElement.hidden = !bars.length;
  const late = job.lines.staleness.slice(first);
  byId("chart-staleness").parentElement.hidden = !bars.length;
  if (bars.length) showChart("chart-staleness", "Mean staleness", times, [["staleness", late]]);
  const waits = Object.entries(job.lines.wait).sort(byWorker).map(([name, values]) => [name.replace(".", " "), values.slice(first)]);
  showChart("chart-wait", "Share of time in waits", times, few(waits, job.straggler && job.straggler.name, ["most", "least"]), percent);
  showChart("chart-bytes", "Bytes a second", times, [["all workers", job.lines.bytes.slice(first)]], bytes);
}

function drawTables() {
  byId("tables").hidden = !job.tables.length;
  if (!job.tables.length) return;
  const servers = job.processes.filter((row) => row.kind === "server").map((row) => row.name);
  const each = servers.length <= 8 ? servers : [];
  const rows = job.tables.map((table) => [
    table.name, count(table.rows), count(table.growth), bytes(table.bytes),
    known(table.balance) ? `${number(table.balance)}x` : "–", ...each.map((name) => bytes(table.servers[name])),
  ]);
  fillTable(byId("table-table"), ["Table", "Rows", "Rows a minute", "Memory", "Largest / mean", ...each], rows);
  setText(byId("memory"), job.over ? "" : job.memory.map((host) => `${host.host}: ${bytes(host.free)} free`
    + (known(host.hours) ? `, enough for ${duration(host.hours * 3600)} if tables grow as now (${bytes(host.growth)}/s)` : "")).join("; "));
  const { times, first } = shown();
  const lines = Object.entries(job.lines.rows).map(([name, values]) => [name, values.slice(first)]);
  showChart("chart-rows", "Rows", times, lines.slice(0, 8));
}

function drawLogged() {
  const { times, first } = shown();
  const names = Object.keys(job.lines.logged);
  byId("logged-hint").hidden = names.length > 0;
  const places = loggedPlaces(names);
  for (const name of names) {
    const [caption, place] = places.get(name).children;
    setText(caption, job.not_finite.includes(name) ? `${name}: now NaN or infinite` : name);
    showChart(`logged:${name}`, name, times, [[name, job.lines.logged[name].slice(first)]], number, place);
  }
}

// The chart of each name; a new one makes the others narrower.
function loggedPlaces(names) {
  const list = byId("logged-charts");
  const places = new Map([...list.children].map((place) => [place.dataset.name, place]));
  const added = names.filter((name) => !places.has(name));
  for (const name of added) {
    const place = list.appendChild(make("figure", {}, make("figcaption"), make("div")));
    place.dataset.name = name;
    places.set(name, place);
  }
  if (added.length) fitCharts();
  return places;
}

const BAD = /exit|fail|lost/;
function drawEvents() {
  setEvents(job.events);
  const list = byId("event-list");
  const newest = [...job.events].reverse();
  const key = `${newest.length}|${newest.length ? newest[0].at : 0}`;
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...newest.map((event) => {
    const tone = BAD.test(event.kind) && !/code 0/.test(event.text) ? "failed" : "";
    return make("li", {}, make("span", { textContent: clock(event.at) }), make("span", { textContent: event.who }),
      make("span", { className: `kind ${tone}`, textContent: event.kind }), make("span", { textContent: event.text }));
  }));
  if (!newest.length) list.append(make("li", { className: "nothing", textContent: "None so far" }));
}

function drawProgram() {
  const { explain, picture } = job.description;
  if (explain) setText(byId("explain"), explain);
  const place = byId("picture");
  place.hidden = !picture;
  if (picture && !place.children.length) place.append(make("img", { src: "program.svg", alt: "The static program as a graph" }));
}

function startTheme() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const choose = (name) => { root.dataset.theme = name; hasDrawn = false; renew(); };
  const saved = localStorage.getItem("fleetlight-theme");
  choose(saved || (system.matches ? "dark" : "light"));
  system.addEventListener("change", () => { if (!localStorage.getItem("fleetlight-theme")) choose(system.matches ? "dark" : "light"); });
  byId("theme").addEventListener("click", () => {
    choose(root.dataset.theme === "dark" ? "light" : "dark");
    localStorage.setItem("fleetlight-theme", root.dataset.theme);
  });
}

function start() {
  startTheme();
  startLogs();
  watchSections();
  follow(receive);
  byId("range").addEventListener("change", () => { hasDrawn = false; renew(); });
  addEventListener("visibilitychange", renew);
  addEventListener("resize", () => { fitCharts(); renew(); });
  setInterval(later, 1000);
}

start();
