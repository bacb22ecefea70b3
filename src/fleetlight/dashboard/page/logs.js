// SPDX-License-Identifier: Apache-2.0
// Logs of the processes: the last lines, or those that have a text.

import { byId, bytes, make, setText } from "./words.js";

const EVERY_MS = 2000;
let asked = 0;
let last = "";
let isVisible = false;

async function json(path) {
  const reply = await fetch(path);
  if (!reply.ok) throw new Error(await reply.text());
  return reply.json();
}

export async function showNames() {
  const select = byId("log-name");
  const names = await json("logs");
  const found = [...select.options].map((option) => option.value);
  if (names.join() === found.join()) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => make("option", { value: name, textContent: name.replace("log.", " ") })));
  if (names.includes(chosen)) select.value = chosen;
}

// The text with what is searched for marked; it is never read as HTML.
function marked(line, find) {
  const at = find ? line.toLowerCase().indexOf(find.toLowerCase()) : -1;
  if (at < 0) return [line, "\n"];
  const end = at + find.length;
  return [line.slice(0, at), make("mark", { textContent: line.slice(at, end) }), line.slice(end), "\n"];
}

async function show() {
  const name = byId("log-name").value, find = byId("log-find").value;
  if (!name) return;
  asked += 1;
  const own = asked;
  const log = await json(`logs/${name}?find=${encodeURIComponent(find)}`);
  if (own !== asked) return;
  const key = `${name}|${find}|${log.bytes}`;
  if (key === last) return;
  last = key;
  const text = byId("log-text");
  text.replaceChildren(...log.lines.flatMap((line) => marked(line, find)));
  text.scrollTop = text.scrollHeight;
  const what = find ? `lines with "${find}" in the last ${bytes(log.bytes - log.from)}` : "last lines";
  setText(byId("log-state"), `${log.lines.length} ${what} of ${bytes(log.bytes)}`);
}

async function refresh() {
  try {
    await showNames();
    await show();
  } catch (error) {
    setText(byId("log-state"), `The log cannot be read: ${error.message}`);
  }
}

export function startLogs() {
  byId("log-form").addEventListener("submit", (event) => event.preventDefault());
  byId("log-name").addEventListener("change", refresh);
  byId("log-find").addEventListener("input", refresh);
  refresh();
  new IntersectionObserver(([entry]) => {
    isVisible = entry.isIntersecting;
    if (isVisible) refresh();
  }).observe(byId("logs"));
  setInterval(() => { if (isVisible && byId("log-follow").checked && !document.hidden) refresh(); }, EVERY_MS);
}
