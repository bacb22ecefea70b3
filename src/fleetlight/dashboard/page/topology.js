// SPDX-License-Identifier: Apache-2.0
// The processes of the job by host, and the links between workers and servers.

import { byId, bytes, makeSvg, setText } from "./words.js";

const MAX_LINKS = 256;
const GAP = 8;
let drawn = "";

const moved = (row) => (row.sent || 0) + (row.received || 0) + (row.host_sent || 0);

// Where each process is: bands of servers and workers, in each the hosts side by side.
function layout(rows, width) {
  const many = rows.length > 24;
  const [w, h] = many ? [40, 24] : [92, 30];
  const places = new Map();
  const boxes = [];
  let y = 4;
  for (const kind of ["server", "worker"]) {
    const hosts = new Map();
    for (const row of rows.filter((one) => one.kind === kind)) {
      const name = row.host || "host not known";
      if (!hosts.has(name)) hosts.set(name, []);
      hosts.get(name).push(row);
    }
    const first = boxes.length;
    let x = 4;
    let bottom = y;
    for (const [host, members] of hosts) {
      const room = Math.max(1, Math.floor((width - 8 - GAP) / (w + GAP)));
      const columns = Math.min(members.length, room);
      const boxWidth = Math.max(columns * (w + GAP) + GAP, Math.min(width - 8, host.length * 6 + 20));
      const boxHeight = Math.ceil(members.length / columns) * (h + GAP) + GAP + 14;
      if (x > 4 && x + boxWidth > width - 4) { x = 4; y = bottom + GAP; }
      boxes.push({ x, y, width: boxWidth, height: boxHeight, host });
      members.forEach((row, i) => places.set(row.name, {
        x: x + GAP + (i % columns) * (w + GAP), y: y + GAP + 14 + Math.floor(i / columns) * (h + GAP), w, h, row,
      }));
      bottom = Math.max(bottom, y + boxHeight);
      x += boxWidth + GAP;
    }
    centre(boxes.slice(first), [...places.values()].filter((place) => place.row.kind === kind), width);
    if (hosts.size) y = bottom + (kind === "server" ? 56 : 4);
  }
  return { places, boxes, height: y + 2, many };
}

function centre(boxes, places, width) {
  const right = Math.max(0, ...boxes.map((box) => box.x + box.width));
  const shift = Math.max(0, Math.floor((width - 4 - right) / 2));
  for (const one of [...boxes, ...places]) one.x += shift;
}

function linkPairs(rows) {
  const servers = rows.filter((row) => row.kind === "server");
  const workers = rows.filter((row) => row.kind === "worker");
  const all = servers.length * workers.length <= MAX_LINKS;
  return workers.flatMap((worker, i) =>
    (all ? servers : servers.slice(i % (servers.length || 1)).slice(0, 1)).map((server) => [worker, server]));
}

function draw(rows, width) {
  const { places, boxes, height, many } = layout(rows, width);
  const svg = makeSvg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  for (const box of boxes) {
    svg.append(makeSvg("rect", { class: "box", x: box.x, y: box.y, width: box.width, height: box.height, rx: 6 }));
  }
  for (const [worker, server] of linkPairs(rows)) {
    const from = places.get(worker.name), to = places.get(server.name);
    const x1 = from.x + from.w / 2, y1 = from.y, x2 = to.x + to.w / 2, y2 = to.y + to.h;
    const middle = (y1 + y2) / 2;
    svg.append(makeSvg("path", { "data-worker": worker.name, d: `M${x1} ${y1}C${x1} ${middle} ${x2} ${middle} ${x2} ${y2}` }));
  }
  for (const box of boxes) {
    const text = makeSvg("text", { class: "host", x: box.x + 8, y: box.y + 14 });
    text.textContent = box.host;
    svg.append(text);
  }
  for (const [name, place] of places) {
    const text = makeSvg("text", { x: place.x + place.w / 2, y: place.y + place.h / 2 + 4, "text-anchor": "middle" });
    text.textContent = many ? `${name[0]}${place.row.index}` : name;
    svg.append(makeSvg("g", { class: "node", "data-name": name },
      makeSvg("rect", { x: place.x, y: place.y, width: place.w, height: place.h, rx: 5 }), text, makeSvg("title")));
  }
  return svg;
}

export function showTopology(rows, slow) {
  const where = byId("topology");
  const width = Math.max(280, where.clientWidth - 2);
  const shape = `${width}|${rows.map((row) => `${row.name}@${row.host}`).join()}`;
  if (shape !== drawn) {
    where.replaceChildren(draw(rows, width));
    drawn = shape;
  }
  const most = Math.max(1, ...rows.filter((row) => row.kind === "worker").map(moved));
  const byName = new Map(rows.map((row) => [row.name, row]));
  for (const node of where.querySelectorAll(".node")) {
    const row = byName.get(node.dataset.name);
    node.setAttribute("class", `node ${row.state}${row.name === slow ? " slow" : ""}`);
    setText(node.querySelector("title"), `${row.name}: ${row.state} ${row.detail}, ${bytes(moved(row))}/s`);
  }
  for (const path of where.querySelectorAll("path")) {
    const row = byName.get(path.dataset.worker);
    const share = row.state === "running" ? moved(row) / most : 0;
    path.style.strokeOpacity = String(0.12 + 0.78 * share);
    path.style.strokeWidth = String(1 + 2.5 * share);
  }
  const states = ["running", "silent", "failed", "ended", "starting", "unknown"]
    .map((state) => [state, rows.filter((row) => row.state === state).length]).filter(([, n]) => n);
  setText(byId("links"), `${states.map(([state, n]) => `${n} ${state}`).join(", ")}. `
    + `Links are stronger where a worker moves more bytes: at most ${bytes(most === 1 ? 0 : most)}/s now.`);
}
