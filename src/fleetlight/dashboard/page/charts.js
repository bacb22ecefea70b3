// SPDX-License-Identifier: Apache-2.0
// Charts over time: one axis for all, with a line at each event.

import { byId, clock, colour, LINE_COLOURS, number, short } from "./words.js";

const HEIGHT = 190;
const EVENT_COLOURS = { exit: "bad", restart: "warn", checkpoint: "good", publication: "accent", join: "accent", leave: "muted", end: "muted" };
let events = [];
const charts = new Map();

export function setEvents(list) {
  events = list.filter((event) => event.kind in EVENT_COLOURS);
}

function drawEvents(plot) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio || 1;
  ctx.save();
  ctx.lineWidth = ratio;
  ctx.setLineDash([3 * ratio, 3 * ratio]);
  for (const event of events) {
    const x = plot.valToPos(event.at, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    const good = event.kind === "exit" && /code 0/.test(event.text);
    ctx.strokeStyle = colour(good ? "muted" : EVENT_COLOURS[event.kind]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

// Hours and minutes, with seconds where ticks are closer than a minute.
function timesOf(plot, ticks) {
  const isClose = ticks.length > 1 && ticks[1] - ticks[0] < 60;
  return ticks.map((at) => clock(at).slice(0, isClose ? 8 : 5));
}

function options(width, labels, say) {
  const axis = { stroke: colour("muted"), grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("grid"), width: 1 }, font: "11px system-ui, sans-serif" };
  return {
    width,
    height: HEIGHT,
    cursor: { sync: { key: "time" }, drag: { x: false, y: false } },
    legend: { show: labels.length > 1 },
    scales: { x: { time: true }, y: { range: (plot, low, high) => [Math.min(0, low), high > 0 ? high * 1.08 : 1] } },
    axes: [{ ...axis, space: 70, values: timesOf }, { ...axis, size: 62, values: (plot, ticks) => ticks.map(say === number ? short : say) }],
    series: [
      { label: "time", value: (plot, at) => (at === null ? "" : clock(at)) },
      ...labels.map((label, i) => ({
        label,
        stroke: LINE_COLOURS[i % LINE_COLOURS.length],
        width: 1.5,
        points: { show: false },
        value: (plot, value) => (value === null ? "–" : say(value)),
      })),
    ],
    hooks: { draw: [drawEvents] },
  };
}

// Shows lines ([label, values] pairs) in the element of an id.
export function showChart(id, name, times, lines, say = number, where = byId(id)) {
  const labels = lines.map(([label]) => label);
  const shape = `${labels.join("\n")}|${document.documentElement.dataset.theme}`;
  const data = [times, ...lines.map(([, values]) => values)];
  let chart = charts.get(id);
  if (chart && chart.shape === shape && chart.where === where) {
    chart.plot.setData(data);
  } else {
    if (chart) chart.plot.destroy();
    const width = Math.max(200, where.clientWidth);
    const plot = new uPlot(options(width, labels, say), data, where);
    chart = { plot, shape, where };
    charts.set(id, chart);
    plot.root.setAttribute("role", "img");
  }
  chart.plot.root.setAttribute("aria-label", `${name}: ${spoken(lines, say)}`);
}

function spoken(lines, say) {
  const newest = lines.map(([label, values]) => {
    const value = values.findLast((one) => one !== null);
    return `${label} ${value === undefined ? "unknown" : say(value)}`;
  });
  return newest.slice(0, 8).join(", ") || "no values";
}

export function fitCharts() {
  for (const { plot, where } of charts.values()) {
    const width = Math.max(200, where.clientWidth);
    if (plot.width !== width) plot.setSize({ width, height: HEIGHT });
  }
}
