// Charts of figures over steps, with axes that have titles, and a cursor for pointers and keys.
const ticks = (low, high, most) => {
  const rough = (high - low) / Math.max(1, most) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / size - 1e-9) || 0; i * size <= high + size * 1e-9; i += 1) found.push(i * size + 0);
  return found;
};
// The words of ticks. Where two would have the same words, all get as many decimals as the distance between ticks needs.
const ticksInWords = (values, words) => {
  const labels = values.map((value) => words(value));
  if (new Set(labels).size === labels.length) return labels;
  const decimals = Math.min(20, Math.max(0, -Math.floor(Math.log10(values[1] - values[0]) + 1e-9)));
  return values.map((value) => value.toFixed(decimals));
};
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "12 4", "1 2"];
const colorOf = (i) => `var(--c${i % 7})`;

// Axes with grid lines. Returns the functions from values to pixels.
const axes = (into, box, x, y) => {
  const atX = (value) => box.left + ((value - x.low) / (x.high - x.low || 1)) * box.width;
  const atY = (value) => box.top + box.height - ((value - y.low) / (y.high - y.low || 1)) * box.height;
  const marks = ticks(y.low, y.high, Math.max(2, box.height / 45));
  const labels = ticksInWords(marks, y.words);
  marks.forEach((value, i) => {
    into.append(svg("line", { class: "grid", x1: box.left, x2: box.left + box.width, y1: atY(value), y2: atY(value) }));
    into.append(svg("text", { x: box.left - 6, y: atY(value) + 4, "text-anchor": "end" }, labels[i]));
  });
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

// Colours from the least to the largest value. Lightness grows, so they also differ without colour.
const HEAT = ["#46105f", "#472d7b", "#3b518b", "#2c718e", "#21908d", "#27ad81", "#5cc863", "#aadc32", "#fde725"];

// Values of rows by steps, with colours on a logarithmic scale. options: title, rows (names), columns ([first, last]),
// values of each row: null is no value, and -1 one that is not finite. begins: as of a line chart.
const heatMap = (options) => {
  const { rows, columns, values } = options;
  const positive = values.flat().filter((value) => value > 0);
  const [low, high] = positive.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, 0]);
  const levelOf = (value) => (value <= 0 || high === low ? 0 : Math.min(HEAT.length - 1, Math.floor((Math.log(value / low) / Math.log(high / low)) * HEAT.length)));
  const words = (value) => (value === null || value === undefined ? "no gradient" : value < 0 ? "not finite" : digits(value));
  const begins = (options.begins || []).filter((step) => step >= columns[0][0] && step < columns[columns.length - 1][1]);
  // The place between a step and the next one, in columns. A column of several steps is divided.
  const placeAfter = (step) => {
    const c = columns.findIndex(([, last]) => last > step);
    const [first, last] = columns[c];
    return c + Math.max(0, step + 1 - first) / (last + 1 - first);
  };
  const stepsOf = ([first, last]) => (first === last ? `Step ${whole(first)}` : `Steps ${whole(first)} to ${whole(last)}`);
  const readout = el("div", { class: "readout" }, "Point at a cell, or use the arrow keys, to read values.");
  const plot = el("div", { class: "plot", id: options.id, tabindex: 0, role: "slider", "aria-label": `${options.title}: cursor over steps; arrow up and down choose the unit`, "aria-valuemin": columns[0][0], "aria-valuemax": columns[columns.length - 1][1], "aria-valuenow": columns[0][0], "aria-valuetext": "no cell chosen" });
  let [row, column] = [-1, -1];
  let box, cursor;
  const show = () => {
    if (row < 0 || !cursor) return;
    cursor.setAttribute("x", box.left + (column / columns.length) * box.width);
    cursor.setAttribute("y", box.top + (row / rows.length) * box.height);
    cursor.setAttribute("visibility", "visible");
  };
  const choose = (r, c) => {
    row = Math.max(0, Math.min(rows.length - 1, r));
    column = Math.max(0, Math.min(columns.length - 1, c));
    const starts = begins.some((step) => Math.floor(placeAfter(step)) === column) ? "; a session begins here" : "";
    readout.textContent = `${stepsOf(columns[column])}, ${rows[row]}: ${words(values[row][column])}${starts}`;
    plot.setAttribute("aria-valuenow", columns[column][0]);
    plot.setAttribute("aria-valuetext", readout.textContent);
    show();
  };
  responsive(plot, (width) => {
    const left = Math.min(width < 600 ? 92 : 170, 14 + 7 * Math.max(...rows.map((name) => name.length)));
    const size = Math.max(3, Math.min(20, 480 / rows.length));
    box = { left, top: 8, width: width - left - 12, height: size * rows.length };
    const bottom = box.top + box.height;
    const picture = svg("svg", { width, height: bottom + 40, "aria-hidden": "true" });
    const paths = new Map();
    const cell = box.width / columns.length;
    values.forEach((own, r) => own.forEach((value, c) => {
      if (value === null) return;
      const color = value < 0 ? "var(--bad)" : HEAT[levelOf(value)];
      const [x, next] = [box.left + c * cell, box.left + (c + 1) * cell];
      paths.set(color, `${paths.get(color) || ""}M${x.toFixed(1)},${(box.top + r * size).toFixed(1)}H${next.toFixed(1)}v${size.toFixed(1)}H${x.toFixed(1)}z`);
    }));
    picture.append(svg("rect", { x: box.left, y: box.top, width: box.width, height: box.height, fill: "var(--panel)" }));
    for (const [color, path] of paths) picture.append(svg("path", { d: path, fill: color, "shape-rendering": "crispEdges" }));
    picture.append(svg("rect", { x: box.left, y: box.top, width: box.width, height: box.height, fill: "none", stroke: "var(--soft)" }));
    for (const step of begins) {
      const x = box.left + placeAfter(step) * cell;
      picture.append(svg("line", { x1: x, x2: x, y1: box.top, y2: bottom, stroke: "var(--ground)", "stroke-width": 3 }));
      picture.append(svg("line", { class: "begin", x1: x, x2: x, y1: box.top, y2: bottom }));
    }
    const letters = Math.floor((left - 8) / 7);
    for (let r = 0; r < rows.length; r += Math.ceil(14 / size)) {
      const name = rows[r].length > letters ? `…${rows[r].slice(1 - letters)}` : rows[r];
      picture.append(svg("text", { x: left - 6, y: box.top + (r + 0.5) * size + 4, "text-anchor": "end" }, name, svg("title", {}, rows[r])));
    }
    const every = Math.ceil(columns.length / Math.max(1, Math.floor(box.width / 70)));
    for (let c = 0; c < columns.length; c += every) {
      picture.append(svg("text", { x: box.left + (c + 0.5) * cell, y: bottom + 16, "text-anchor": "middle" }, whole(columns[c][0])));
    }
    picture.append(svg("text", { class: "title", x: width - 12, y: bottom + 34, "text-anchor": "end" }, "optimizer step"));
    cursor = svg("rect", { width: Math.max(3, cell), height: Math.max(3, size), fill: "none", stroke: "var(--ground)", "stroke-width": 4, "paint-order": "stroke", visibility: "hidden", class: "cell" });
    picture.append(cursor);
    show();
    return picture;
  });
  const point = (event) => {
    const at = plot.getBoundingClientRect();
    const [x, y] = [event.clientX - at.left - box.left, event.clientY - at.top - box.top];
    if (x >= 0 && y >= 0 && x < box.width && y < box.height) choose(Math.floor((y / box.height) * rows.length), Math.floor((x / box.width) * columns.length));
  };
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointermove", point);
  plot.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -columns.length], End: [0, columns.length] }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (row < 0) choose(0, 0);
    else choose(row + to[0], column + to[1]);
  });
  const wrong = values.some((own) => own.some((value) => value < 0));
  const scale = positive.length ? [el("li", {}, digits(low)), el("li", {}, el("span", { class: "heat", "aria-hidden": "true" }, HEAT.map((color) => styled(el("span"), { background: color })))), el("li", {}, `${digits(high)}, logarithmic`)] : [];
  const legend = el("ul", { class: "legend", "aria-label": "colours of values" }, scale, wrong ? el("li", {}, swatch("var(--bad)"), "not finite") : "");
  return el("figure", {}, el("figcaption", {}, options.title), legend, plot, readout);
};
