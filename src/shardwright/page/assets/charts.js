// Charts of figures over steps, with axes that have titles, and a cursor for pointers and keys.
const ticks = (low, high, most) => {
  const rough = (high - low) / Math.max(1, most) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / size - 1e-9) || 0; i * size <= high + size * 1e-9; i += 1) found.push(i * size + 0);
  return found;
};
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "12 4", "1 2"];
const colorOf = (i) => `var(--c${i % 7})`;

// Axes with grid lines. Returns the functions from values to pixels.
const axes = (into, box, x, y) => {
  const atX = (value) => box.left + ((value - x.low) / (x.high - x.low || 1)) * box.width;
  const atY = (value) => box.top + box.height - ((value - y.low) / (y.high - y.low || 1)) * box.height;
  for (const value of ticks(y.low, y.high, Math.max(2, box.height / 45))) {
    into.append(svg("line", { class: "grid", x1: box.left, x2: box.left + box.width, y1: atY(value), y2: atY(value) }));
    into.append(svg("text", { x: box.left - 6, y: atY(value) + 4, "text-anchor": "end" }, y.words(value)));
  }
  for (const value of ticks(x.low, x.high, Math.max(2, box.width / 80))) {
    if (x.whole && !Number.isInteger(value)) continue;
    into.append(svg("line", { class: "axis", x1: atX(value), x2: atX(value), y1: box.top + box.height, y2: box.top + box.height + 4 }));
    into.append(svg("text", { x: atX(value), y: box.top + box.height + 17, "text-anchor": "middle" }, x.words(value)));
  }
  into.append(svg("line", { class: "axis", x1: box.left, x2: box.left + box.width, y1: box.top + box.height, y2: box.top + box.height }));
  into.append(svg("text", { class: "title", x: box.left + box.width, y: box.top + box.height + 33, "text-anchor": "end" }, x.title));
  into.append(svg("text", { class: "title", x: 0, y: 14 }, y.title));
  return [atX, atY];
};

// The key of a series: its colour, its dash or its mark.
const keyOf = (series) => {
  const mark = svg("svg", { width: 26, height: 14, "aria-hidden": "true" });
  if (series.marks) mark.append(svg("circle", { cx: 13, cy: 7, r: 4, fill: series.hollow ? "none" : series.color, stroke: series.color, "stroke-width": 2 }));
  else mark.append(svg("line", { x1: 0, x2: 26, y1: 7, y2: 7, stroke: series.color, "stroke-width": 2.5, "stroke-dasharray": series.dash || "" }));
  return el("li", {}, mark, series.name);
};

// options: title, x and y (titles), series of {name, color, dash, marks, points}, words of a value, zero: y begins at 0,
// begins: steps after which a later session begins, each a vertical line.
const lineChart = (options) => {
  const series = options.series.filter((each) => each.points.length);
  const points = series.flatMap((each) => each.points);
  if (!points.length) return null;
  const xs = [...new Set(points.map(([x]) => x))].sort((a, b) => a - b);
  const values = points.map(([, y]) => y);
  let low = options.zero ? Math.min(0, ...values.slice(0, 1)) : Infinity;
  let high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (high === low) { high += Math.abs(high) * 0.1 || 1; if (!options.zero) low -= Math.abs(low) * 0.1; }
  const room = (high - low) * 0.05;
  const y = { low: options.zero ? low : low - room, high: high + room, title: options.y, words: options.axis || options.words };
  let [first, last] = [xs[0], xs[xs.length - 1]];
  if (first === last) { first -= 1; last += 1; }
  const x = { low: first, high: last, title: options.x, words: whole, whole: true };
  const readout = el("div", { class: "readout" }, `Steps ${whole(xs[0])} to ${whole(xs[xs.length - 1])}. Click, or use the arrow keys, to read values.`);
  const plot = el("div", { class: "plot", tabindex: 0, role: "slider", "aria-label": `${options.title}: cursor over steps`, "aria-valuemin": xs[0], "aria-valuemax": xs[xs.length - 1], "aria-valuenow": xs[0], "aria-valuetext": "no step chosen" });
  const maps = series.map((each) => new Map(each.points));
  const begins = (options.begins || []).filter((step) => step >= xs[0] && step < xs[xs.length - 1]);
  let chosen = -1;
  let box, atX, line;
  const choose = (index) => {
    chosen = Math.max(0, Math.min(xs.length - 1, index));
    const at = xs[chosen];
    const words = series.map((each, i) => (maps[i].has(at) ? `${each.name} ${options.words(maps[i].get(at))}` : "")).filter(Boolean);
    if (begins.includes(at - 1)) words.push("the first step of a session");
    readout.textContent = `Step ${whole(at)}: ${words.join("; ") || "no value"}`;
    plot.setAttribute("aria-valuenow", at);
    plot.setAttribute("aria-valuetext", readout.textContent);
    show();
  };
  const show = () => {
    if (chosen < 0 || !line) return;
    for (const name of ["x1", "x2"]) line.setAttribute(name, atX(xs[chosen]));
    line.setAttribute("visibility", "visible");
  };
  responsive(plot, (width) => {
    const height = 250;
    const picture = svg("svg", { width, height, "aria-hidden": "true" });
    box = { left: 62, top: 24, width: width - 76, height: height - 64 };
    let atY;
    [atX, atY] = axes(picture, box, x, y);
    for (const step of begins) picture.append(svg("line", { class: "begin", x1: atX(step + 0.5), x2: atX(step + 0.5), y1: box.top, y2: box.top + box.height }));
    for (const each of series) {
      if (!each.marks) {
        const path = each.points.map(([px, py], i) => `${i ? "L" : "M"}${atX(px).toFixed(1)},${atY(py).toFixed(1)}`).join("");
        picture.append(svg("path", { d: path, fill: "none", stroke: each.color, "stroke-width": 1.8, "stroke-dasharray": each.dash || "" }));
      }
      if (each.marks || each.points.length < 3) {
        for (const [px, py] of each.points) picture.append(svg("circle", { cx: atX(px), cy: atY(py), r: 3.5, fill: each.hollow ? "var(--ground)" : each.color, stroke: each.color, "stroke-width": 2 }));
      }
    }
    line = svg("line", { class: "cursor", y1: box.top, y2: box.top + box.height, visibility: "hidden" });
    picture.append(line);
    show();
    return picture;
  });
  const nearest = (event) => {
    const wanted = x.low + ((event.clientX - plot.getBoundingClientRect().left - box.left) / box.width) * (x.high - x.low);
    let best = 0;
    xs.forEach((value, i) => { if (Math.abs(value - wanted) < Math.abs(xs[best] - wanted)) best = i; });
    choose(best);
  };
  plot.addEventListener("pointerdown", nearest);
  plot.addEventListener("pointermove", (event) => { if (event.buttons) nearest(event); });
  plot.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.round(xs.length / 10));
    const to = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, PageDown: chosen + page, PageUp: chosen - page, Home: 0, End: xs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(to);
  });
  const legend = series.length > 1 || options.legend ? el("ul", { class: "legend" }, series.map(keyOf)) : null;
  return el("figure", {}, el("figcaption", {}, options.title), legend, plot, readout, options.note ? soft(options.note) : null);
};
