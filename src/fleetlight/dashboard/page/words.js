// SPDX-License-Identifier: Apache-2.0
// Numbers, times and elements as the page shows them.

export const PART_COLOURS = ["#3b78e0", "#12929a", "#8d63d9", "#2f9e50", "#8b96a3", "#d9822b", "#c9478f", "#67707c"];
export const LINE_COLOURS = ["#3b78e0", "#d9822b", "#2f9e50", "#c9478f", "#12929a", "#8d63d9", "#a3901f", "#d04a3f"];

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const three = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function number(value) {
  if (!known(value)) return "–";
  return Math.abs(value) >= 1000 ? whole.format(value) : three.format(value);
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

// As short as the scale of a chart needs.
export const short = (value) => (known(value) ? compact.format(value) : "–");

export function count(value) {
  return known(value) ? whole.format(value) : "–";
}

export function bytes(value) {
  if (!known(value)) return "–";
  let unit = 0;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  while (Math.abs(value) >= 1024 && unit < 4) { value /= 1024; unit += 1; }
  return `${three.format(value)} ${units[unit]}`;
}

export function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 0.9995) return `${three.format(seconds * 1000)} ms`;
  if (seconds < 120) return `${three.format(seconds)} s`;
  if (seconds < 7200) return `${whole.format(seconds / 60)} min`;
  if (seconds < 172800) return `${three.format(seconds / 3600)} h`;
  return `${three.format(seconds / 86400)} days`;
}

export const percent = (value) => (known(value) ? `${three.format(value * 100)} %` : "–");

export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

export const byId = (id) => document.getElementById(id);

// An element with properties and children; text is never read as HTML.
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, properties);
  element.append(...children);
  return element;
}

export function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Writes rows of cells into a table, and changes only the cells that differ.
// A cell is a text, or [text, class].
export function fillTable(table, heads, rows) {
  fillRows(table.tHead, [heads], "th");
  fillRows(table.tBodies[0], rows, "td");
}

function fillRows(body, rows, tag) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, y) => {
    const row = body.rows[y] || body.insertRow();
    row.className = cells.className || "";
    while (row.cells.length > cells.length) row.deleteCell(-1);
    cells.forEach((cell, x) => {
      const place = row.cells[x] || row.appendChild(document.createElement(tag));
      const [text, name] = Array.isArray(cell) ? cell : [cell, ""];
      if (tag === "th") place.scope = "col";
      setText(place, text);
      if (place.className !== name) place.className = name;
    });
  });
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
