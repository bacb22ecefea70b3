// SPDX-License-Identifier: Apache-2.0
// Step times of each worker over time, by colour: a row for each worker.

import { byId, clock, colour, duration, known, setText } from "./words.js";

const LABEL = 74;
const STOPS = [[-1, [44, 123, 182]], [0, [143, 169, 184]], [0.6, [224, 138, 46]], [1, [200, 30, 30]]];
let shown = null;
let isPointedAt = false;

function ramp(ratio) {
  const at = Math.max(-1, Math.min(1, Math.log2(ratio)));
  const i = STOPS.findIndex(([stop]) => at <= stop);
  if (i <= 0) return `rgb(${STOPS[0][1]})`;
  const [low, a] = STOPS[i - 1], [high, b] = STOPS[i];
  const t = (at - low) / (high - low);
  return `rgb(${a.map((value, c) => Math.round(value + (b[c] - value) * t))})`;
}

export function median(values) {
  const sorted = values.filter(known).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : null;
}

export function showHeat(times, lines) {
  byId("heat").hidden = lines.length < 2;
  if (lines.length < 2) return;
  const canvas = byId("heat").querySelector("canvas");
  const ratio = devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth, each = lines.length > 16 ? 9 : 16;
  canvas.width = width * ratio;
  canvas.height = lines.length * each * ratio;
  canvas.style.height = `${lines.length * each}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  ctx.fillStyle = colour("text");
  ctx.font = `${Math.min(11, each)}px system-ui, sans-serif`;
  ctx.textBaseline = "middle";
  const cell = (width - LABEL) / Math.max(1, times.length);
  const medians = times.map((_, i) => median(lines.map(([, values]) => values[i])));
  lines.forEach(([name, values], y) => {
    ctx.fillStyle = colour("text");
    ctx.fillText(name, 0, y * each + each / 2);
    values.forEach((value, i) => {
      if (!known(value) || !medians[i]) return;
      ctx.fillStyle = ramp(value / medians[i]);
      ctx.fillRect(LABEL + i * cell, y * each + 0.5, Math.max(cell + 0.3, 0.5), each - 1);
    });
  });
  if (!isPointedAt && times.length) setText(byId("heat-text"), `${clock(times[0])} to ${clock(times[times.length - 1])}; point at a cell for its time`);
  shown = { times, lines, medians, each, cell };
}

function describe(event) {
  if (!shown) return;
  isPointedAt = true;
  const i = Math.floor((event.offsetX - LABEL) / shown.cell), y = Math.floor(event.offsetY / shown.each);
  const line = shown.lines[y];
  if (!line || !known(line[1][i])) return;
  const at = clock(shown.times[i]);
  setText(byId("heat-text"), `${line[0]} at ${at}: ${duration(line[1][i])} a step, the median is ${duration(shown.medians[i])}`);
}

byId("heat").querySelector("canvas").addEventListener("mousemove", describe);
byId("heat").addEventListener("mouseleave", () => { isPointedAt = false; });
