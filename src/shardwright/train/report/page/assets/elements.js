// Elements and numbers. Text of the data becomes text of the page here, and nothing else: no markup is ever parsed.
const el = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
};
const svg = (tag, attributes = {}, ...children) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
const styled = (element, styles) => Object.assign(element.style, styles) && element;

// -- numbers in words

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const digits = (value, count = 3) => {
  if (!isNumber(value)) return "not known";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e15)) return value.toExponential(2);
  if (size < 1) return value.toLocaleString("en-US", { maximumSignificantDigits: count });
  const behind = size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2;
  return value.toLocaleString("en-US", { maximumFractionDigits: behind });
};
const whole = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en-US") : "not known");
const inNats = (value) => (isNumber(value) ? value.toFixed(4) : "not known");
const percent = (value) => (isNumber(value) ? `${(100 * value).toFixed(1)}%` : "not known");
const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
const unitOf = (value) => UNITS.find(([, size]) => Math.abs(value) >= size) || ["B", 1];
const inBytes = (value) => {
  if (!isNumber(value)) return "not known";
  const [name, size] = unitOf(value);
  return `${size === 1 ? whole(value) : (value / size).toFixed(2)} ${name}`;
};
const TIMES = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]];
const timeUnit = (seconds) => TIMES.find(([, size]) => Math.abs(seconds) >= size) || TIMES[2];
const inTime = (seconds) => {
  if (!isNumber(seconds)) return "not known";
  if (seconds === 0) return "0 s";
  if (Math.abs(seconds) >= 7200) return `${digits(seconds / 3600)} hours`;
  if (Math.abs(seconds) >= 120) return `${digits(seconds / 60)} minutes`;
  const [name, size] = timeUnit(seconds);
  return `${digits(seconds / size)} ${name}`;
};
const range = (values, words) => (values[0] === values[2] ? "" : `between ${words(values[0])} and ${words(values[2])}`);

// -- parts of a page

// columns: [name, whether it has numbers]. rows: cells, of which each is text or an element; the first one is a heading.
const table = (caption, columns, rows, options = {}) => {
  const head = columns.map(([name, number]) => el("th", { scope: "col", class: number ? "number" : null }, name));
  const body = rows.map((cells, i) =>
    el("tr", { class: options.chosen && options.chosen(i) ? "chosen" : null },
      cells.map((cell, k) => el(k ? "td" : "th", { scope: k ? null : "row", class: columns[k][1] ? "number" : "wrap" }, cell))));
  const made = el("table", { id: options.id }, el("caption", {}, el("span", {}, caption)), el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
  const around = el("div", { class: "scroll", role: "region", "aria-label": caption }, made);
  // Keys scroll what has the focus, so a table takes it where it is wider than the page.
  new ResizeObserver(() => {
    if (around.scrollWidth > around.clientWidth) around.setAttribute("tabindex", 0);
    else around.removeAttribute("tabindex");
  }).observe(around);
  return around;
};
const figures = (pairs) =>
  el("dl", { class: "figures" }, pairs.map(([name, value, more]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, breakable(more)) : null))));
// The text with places where a line may end inside a long name: behind "_" and ".", except at its begin and in a number.
const breakable = (text) => text.split(/(?<=[\p{L}\p{N}]_|\p{L}\.)(?=[\p{L}\p{N}])/u).flatMap((part, i) => (i ? [el("wbr"), part] : [part]));
const section = (title, ...children) => {
  const id = "section-" + title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  return el("section", { "aria-labelledby": id }, el("h2", { id }, title), ...children);
};
const details = (summary, ...children) => el("details", {}, el("summary", {}, summary), ...children);
const swatch = (color) => styled(el("span", { class: "swatch", "aria-hidden": "true" }), { background: color });
// A part of the page, or, if its data are of an unexpected kind, a statement in its place.
const attempt = (draw) => {
  try {
    return draw();
  } catch (error) {
    return el("p", { class: "notice" }, `A part of this page could not be drawn from its data: ${error.message}`);
  }
};
// Keys of the configuration as options. A line may end between two of them, and not inside one.
const optionsOf = (keys) => Object.entries(keys).flatMap(([key, value]) => [el("code", { class: "option" }, `--${key} ${value}`), " "]);
const soft = (...children) => el("p", { class: "soft small" }, ...children);

// Draw again whenever the width of an element changes. draw(width) returns the new content.
const responsive = (element, draw) => {
  let last = 0;
  const again = () => {
    const width = Math.floor(element.clientWidth);
    if (width > 0) element.replaceChildren(draw(width));
  };
  new ResizeObserver(() => {
    if (element.clientWidth !== last) { last = element.clientWidth; again(); }
  }).observe(element);
  return again;
};
