// One step, planned or noted in a run: memory by owner above the streams, on one axis of time, and the tensors that are alive at a chosen moment.
const GROUP_WORDS = {
  parameters: "parameters (this rank's shards)", optimizer: "optimizer state", gradients: "gradients",
  slabs: "slabs: gathered parameters and reductions", activations: "activations for backward",
  temporary: "temporary: gone in the same phase", other: "other",
};
const LEASE_WORDS = {
  parameters: "gathered parameters of a unit", reduction: "full gradients of a unit, packed to be reduced", gradients: "this rank's part of reduced gradients",
  sum: "this rank's part, to be added to gradients", "cast shard": "this rank's shard, cast for the gather",
};
const PLANNED = {
  id: "", title: "One step: memory by owner, and streams", axis: "as planned", memory: "live memory", state: "live", leases: false, words: GROUP_WORDS,
  intro: "The last planned step of one rank. Above, live memory by owner; below, the kernels of each stream, on the same axis of time.",
  note: "Memory is drawn when the computation and the host have reached the allocation. A column of pixels shows the moment with the most live bytes.",
};
const WORK_WORDS = {
  products: "matrix products", attention: "attention", memory: "reads and writes memory", optimizer: "optimizer",
  communication: "collectives", copies: "copies between host and device", nothing: "nothing",
  forward: "forward", backward: "backward", host: "outside of both", waiting: "the host waits",
};
const WORK_COLORS = { products: "var(--c0)", attention: "var(--c2)", memory: "var(--c5)", optimizer: "var(--c4)", communication: "var(--c1)", copies: "var(--c3)", nothing: "var(--c6)", forward: "var(--c5)", backward: "var(--c0)", host: "var(--c6)", waiting: "var(--c4)" };
const ROWS = 20;

// The bytes of each group at each moment, and the times of the moments.
const course = (step) => {
  const count = step.taken.length;
  const groups = step.groups.map(() => new Float64Array(count));
  const times = new Float64Array(count);
  const gone = new Map();
  const now = new Float64Array(step.groups.length);
  const small = new Float64Array(step.groups.length);
  const leave = (moment, kind) => { if (!gone.has(moment)) gone.set(moment, []); gone.get(moment).push(kind); };
  for (const [kind, end] of step.held) {
    now[step.kinds[kind][0]] += step.kinds[kind][4];
    if (end >= 0) leave(end, kind);
  }
  let time = 0;
  for (let i = 0; i < count; i += 1) {
    time += step.times[i];
    times[i] = time;
    for (const kind of gone.get(i) || []) now[step.kinds[kind][0]] -= step.kinds[kind][4];
    const kind = step.taken[i];
    if (kind >= 0) {
      now[step.kinds[kind][0]] += step.kinds[kind][4];
      if (step.lives[i]) leave(i + step.lives[i], kind);
    }
    step.small.forEach((changes, g) => { small[g] += changes[i]; });
    now.forEach((nbytes, g) => { groups[g][i] = nbytes + small[g]; });
  }
  const total = times.map((_, i) => groups.reduce((sum, each) => sum + each[i], 0));
  let peak = 0;
  total.forEach((nbytes, i) => { if (nbytes > total[peak]) peak = i; });
  return { count, groups, times, total, peak };
};

// The blocks that are alive at a moment, equal ones of one owner together, the largest first.
const aliveAt = (step, moment) => {
  const counts = new Map();
  const add = (kind) => counts.set(kind, (counts.get(kind) || 0) + 1);
  for (const [kind, end] of step.held) if (end < 0 || end > moment) add(kind);
  for (let i = 0; i <= moment; i += 1) {
    if (step.taken[i] >= 0 && (!step.lives[i] || i + step.lives[i] > moment)) add(step.taken[i]);
  }
  const rows = [...counts].map(([kind, count]) => {
    const [group, unit, what, line, nbytes] = step.kinds[kind];
    return { group: step.groups[group], unit: step.texts[unit], what: step.texts[what], line: step.texts[line], count, bytes: nbytes * count };
  });
  step.small.forEach((changes, g) => {
    const bytes = changes.slice(0, moment + 1).reduce((sum, each) => sum + each, 0);
    if (bytes) rows.push({ group: step.groups[g], unit: `all blocks below ${inBytes(step.small_bytes)}`, what: "", line: "", count: null, bytes });
  });
  return rows.sort((a, b) => b.bytes - a.bytes);
};

// "mm bfloat16 [4096, 1024]" has an operation, a dtype and a shape.
const splitWhat = (what) => {
  const match = /^(.*?)\s?([a-z]+[0-9a-z_]*)?\s?(\[[0-9, ]*\])$/.exec(what);
  return match ? [match[1], [match[2], match[3]].filter(Boolean).join(" ")] : [what, ""];
};

const groupOf = (name, groups) => el("span", {}, swatch(`var(--g${Math.max(0, groups.indexOf(name)) % 7})`), name);
const leaseTable = (caption, rows, groups, id) => table(caption, [["kind"], ["size", true], ["leases", true], ["unit"]],
  rows.map((row) => [groupOf(row.group, groups), inBytes(row.bytes), whole(row.count), row.unit || "-"]), { id });
const tensorTable = (caption, rows, more, id) => {
  const shown = rows.slice(0, more ? 300 : ROWS);
  const rest = rows.slice(shown.length);
  const cells = shown.map((row) => {
    const [operation, shape] = row.group === "slabs" && row.unit.includes(" of ") ? ["", row.what] : splitWhat(row.what);
    return [groupOf(row.group, Object.keys(GROUP_WORDS)), inBytes(row.bytes), row.count === null ? "several" : whole(row.count || 1), row.unit || "outside of all modules", operation || "-", shape || "not recorded", row.line || "-"];
  });
  if (rest.length) cells.push([`${whole(rest.length)} smaller ones`, inBytes(rest.reduce((sum, row) => sum + row.bytes, 0)), "", "", "", "", ""]);
  return table(caption, [["owner"], ["size", true], ["blocks", true], ["unit or parameter"], ["operation"], ["dtype and shape, or parameters of the unit"], ["line"]], cells, { id });
};

const spansOf = (stream) => {
  let at = 0;
  return stream.kernels.map((kernel, i) => {
    const start = at + stream.gaps[i];
    at = start + stream.lengths[i];
    return { kernel, start, end: at };
  });
};

const stepSection = (plan, options = PLANNED) => {
  const step = plan.step;
  const made = course(step);
  if (!made.count) return section(options.title, el("p", {}, "This step takes no memory."));
  const timed = step.unit_seconds !== null;
  const words = (units) => (timed ? inTime(units * step.unit_seconds) : `event ${whole((units / step.length) * made.count)}`);
  const streams = (step.streams || []).map((each) => ({ name: each.name, spans: spansOf(each) }));
  const kernelName = (number) => {
    const several = number < 0;
    const [name] = step.kernels[several ? -1 - number : number];
    return several ? `several kernels, the longest: ${name}` : name;
  };
  const phases = step.phases.filter(([name]) => name !== "step");
  const phaseAt = (time) => phases.reduce((found, [name, at]) => (at <= time ? name : found), "");
  const used = step.groups.map((_, g) => g).filter((g) => made.groups[g].some((nbytes) => nbytes > 0));
  const kindsOfWork = [...new Set((step.kernels || []).map(([, kind]) => kind))];
  let view = [0, step.length];
  let moment = made.peak;
  let more = false;
  let columns = [];

  const plot = el("div", { class: "plot", id: `${options.id}step`, tabindex: 0, role: "slider", "aria-label": "moment of the step", "aria-valuemin": 0, "aria-valuemax": made.count - 1, "aria-describedby": `${options.id}step-keys` });
  const readout = el("p", { class: "readout", id: `${options.id}moment` });
  const owners = el("div", {});
  const tensors = el("div", {});
  let cursor = null;
  let toX = () => 0;

  const runningAt = (time) => streams.map(({ name, spans }) => {
    const span = spans.find((each) => each.start <= time && time < each.end);
    return `${name}: ${span ? `${kernelName(span.kernel)} (${inTime((span.end - span.start) * step.unit_seconds)})` : "idle"}`;
  });
  const tell = () => {
    const time = made.times[moment];
    const at = `At ${words(time)}${timed ? ` of ${words(step.length)}` : ""} (${phaseAt(time) || "step"}): ${inBytes(made.total[moment])} ${options.state}`;
    readout.replaceChildren(el("strong", {}, `${at}${moment === made.peak ? ", the peak of the step" : ""}.`), " ", runningAt(time).join("; "));
    plot.setAttribute("aria-valuenow", moment);
    plot.setAttribute("aria-valuetext", at);
    const cells = used.map((g) => [
      el("span", {}, swatch(`var(--g${g % 7})`), options.words[step.groups[g]] || step.groups[g]), inBytes(made.groups[g][moment]),
      percent(made.groups[g][moment] / (made.total[moment] || 1)), inBytes(made.groups[g][made.peak]),
    ]);
    cells.push(["all", inBytes(made.total[moment]), "100.0%", inBytes(made.total[made.peak])]);
    owners.replaceChildren(table(options.leases ? "Leased memory by kind" : "Live memory by owner", [[options.leases ? "kind" : "owner"], ["at this moment", true], ["share", true], ["at the step's peak", true]], cells, { id: `${options.id}owners` }));
    const rows = aliveAt(step, moment);
    if (options.leases) tensors.replaceChildren(leaseTable(`The ${whole(rows.length)} leases at this moment, the largest first`, rows.slice(0, 300), step.groups, `${options.id}tensors`));
    else tensors.replaceChildren(
      tensorTable(`The ${whole(rows.length)} kinds of tensors that are alive at this moment, the largest first`, rows, more, `${options.id}tensors`),
      rows.length > ROWS ? el("button", { type: "button", onclick: () => { more = !more; tell(); } }, more ? `Show the ${ROWS} largest` : `Show up to 300`) : "");
    if (cursor) for (const name of ["x1", "x2"]) cursor.setAttribute(name, toX(time));
  };

  const draw = (width) => {
    const lane = 24;
    const box = { left: 62, top: 44, width: width - 74, height: width < 600 ? 190 : 280 };
    const below = box.top + box.height + 8;
    const height = below + streams.length * lane + 42;
    const picture = svg("svg", { width, height, "aria-hidden": "true" });
    const peak = made.total[made.peak];
    const room = plan.room_bytes <= 2 * peak ? plan.room_bytes : 0;
    const top = Math.max(peak * 1.06, room * 1.02);
    const [unit, size] = unitOf(top);
    const [a, b] = view;
    toX = (time) => box.left + Math.max(-1, Math.min(box.width + 1, ((time - a) / (b - a)) * box.width));
    const toY = (nbytes) => box.top + box.height - (nbytes / top) * box.height;
    for (const value of ticks(0, top / size, box.height / 45)) {
      picture.append(svg("line", { class: "grid", x1: box.left, x2: box.left + box.width, y1: toY(value * size), y2: toY(value * size) }));
      picture.append(svg("text", { x: box.left - 6, y: toY(value * size) + 4, "text-anchor": "end" }, digits(value)));
    }
    picture.append(svg("text", { class: "title", x: 0, y: 14 }, `${options.memory} (${unit})`));
    // Of each column of pixels the moment with the most live bytes, so that no peak is lost.
    columns = new Array(Math.max(1, Math.floor(box.width))).fill(-1);
    let before = 0;
    for (let i = 0; i < made.count; i += 1) {
      if (made.times[i] < a) { before = i; continue; }
      if (made.times[i] > b) break;
      const column = Math.min(columns.length - 1, Math.floor(((made.times[i] - a) / (b - a)) * columns.length));
      if (columns[column] < 0 || made.total[i] > made.total[columns[column]]) columns[column] = i;
    }
    let last = before;
    const lasts = [];  // the last moment up to each column, which stays until the next one
    for (let c = 0, i = before; c < columns.length; c += 1) {
      const end = a + ((c + 1) / columns.length) * (b - a);
      while (i < made.count && made.times[i] < end) { last = i; i += 1; }
      lasts.push(last);
      if (columns[c] < 0) columns[c] = c ? lasts[c - 1] : before;
    }
    const base = new Float64Array(columns.length);
    for (const g of used) {
      const upper = [];
      const lower = [];
      columns.forEach((at, c) => {
        const x = box.left + c;
        const low = toY(base[c]);
        base[c] += made.groups[g][at];
        upper.push(`${x},${toY(base[c]).toFixed(1)} ${x + 1},${toY(base[c]).toFixed(1)}`);
        lower.unshift(`${x + 1},${low.toFixed(1)} ${x},${low.toFixed(1)}`);
      });
      picture.append(svg("polygon", { points: `${upper.join(" ")} ${lower.join(" ")}`, fill: `var(--g${g % 7})` }));
    }
    if (room) {
      picture.append(svg("line", { class: "limit", x1: box.left, x2: box.left + box.width, y1: toY(room), y2: toY(room) }));
      picture.append(svg("text", { x: box.left + box.width, y: toY(room) + 15, "text-anchor": "end" }, `room for PyTorch's allocator: ${inBytes(room)}`));
    }
    phases.forEach(([name, start], i) => {
      const end = i + 1 < phases.length ? phases[i + 1][1] : step.length;
      if (end <= a || start >= b) return;
      const [x1, x2] = [toX(start), toX(end)];
      picture.append(svg("line", { class: "axis", x1, x2: x1, y1: box.top - 20, y2: below + streams.length * lane }));
      const short = name.replace(" the optimizer", "");
      if (x2 - x1 > short.length * 7 + 6) picture.append(svg("text", { x: x1 + 4, y: box.top - 8 }, short));
    });
    streams.forEach(({ name, spans }, i) => {
      const y = below + i * lane;
      picture.append(svg("text", { class: "title", x: 0, y: y + 15 }, name.length > 9 ? `${name.slice(0, 8)}…` : name, svg("title", {}, name)));
      picture.append(svg("line", { class: "grid", x1: box.left, x2: box.left + box.width, y1: y + lane - 2, y2: y + lane - 2 }));
      // Spans of one column and one kind become one rectangle. Its opacity is the part of the column that they fill.
      const filled = new Map();
      for (const span of spans) {
        if (span.end < a || span.start > b) continue;
        const work = step.kernels[span.kernel < 0 ? -1 - span.kernel : span.kernel][1];
        const [x1, x2] = [toX(span.start), toX(span.end)];
        if (x2 - x1 >= 1.5) picture.append(svg("rect", { x: x1.toFixed(1), y, width: (x2 - x1 - 0.3).toFixed(1), height: lane - 5, fill: WORK_COLORS[work] }));
        else {
          const key = `${Math.floor(x1)} ${work}`;
          filled.set(key, (filled.get(key) || 0) + (x2 - x1));
        }
      }
      const paths = new Map();
      for (const [key, part] of filled) {
        const [x, work] = key.split(" ");
        const place = `${work} ${Math.min(4, Math.max(1, Math.ceil(part * 4)))}`;
        paths.set(place, `${paths.get(place) || ""}M${x},${y}h1v${lane - 5}h-1z`);
      }
      for (const [place, path] of paths) {
        const [work, level] = place.split(" ");
        picture.append(svg("path", { d: path, fill: WORK_COLORS[work], "fill-opacity": Number(level) / 4 }));
      }
    });
    const bottom = below + streams.length * lane;
    const [timeName, timeSize] = timed ? timeUnit((b - a) * step.unit_seconds) : ["", 1];
    const scale = timed ? step.unit_seconds / timeSize : made.count / step.length;
    for (const value of ticks(a * scale, b * scale, Math.max(2, box.width / 90))) {
      picture.append(svg("line", { class: "axis", x1: toX(value / scale), x2: toX(value / scale), y1: bottom, y2: bottom + 4 }));
      picture.append(svg("text", { x: toX(value / scale), y: bottom + 17, "text-anchor": "middle" }, digits(value)));
    }
    picture.append(svg("text", { class: "title", x: box.left + box.width, y: bottom + 35, "text-anchor": "end" }, timed ? `time in the step (${timeName}), ${options.axis}` : "allocations and frees so far"));
    cursor = svg("line", { class: "cursor", y1: box.top - 4, y2: bottom });
    picture.append(cursor);
    tell();
    return picture;
  };
  const again = responsive(plot, draw);

  const columnOf = (at) => Math.max(0, Math.min(columns.length - 1, Math.floor(((made.times[at] - view[0]) / (view[1] - view[0])) * columns.length)));
  const go = (to) => {
    moment = Math.max(0, Math.min(made.count - 1, to));
    const time = made.times[moment];
    if (time < view[0] || time > view[1]) {
      const half = (view[1] - view[0]) / 2;
      const middle = Math.max(half, Math.min(step.length - half, time));
      view = [middle - half, middle + half];
      again();
    } else tell();
  };
  const turn = (way) => {  // to the next column of pixels with another moment
    let column = columnOf(moment);
    while (column + way >= 0 && column + way < columns.length) {
      column += way;
      if (columns[column] !== moment && columnOf(columns[column]) === column) return go(columns[column]);
    }
    return go(moment + way);
  };
  const zoom = (factor) => {
    const width = Math.max(step.length / 2000, Math.min(step.length, (view[1] - view[0]) * factor));
    const begin = Math.max(0, Math.min(step.length - width, made.times[moment] - width / 2));
    view = [begin, begin + width];
    again();
  };
  const point = (event) => {
    const column = Math.floor(event.clientX - plot.getBoundingClientRect().left - 62);
    if (column >= 0 && column < columns.length) go(columns[column]);
  };
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointermove", (event) => { if (event.buttons) point(event); });
  plot.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const far = Math.max(1, Math.round(columns.length / 10));
    const jump = (way) => {
      const column = Math.max(0, Math.min(columns.length - 1, columnOf(moment) + way * far));
      return go(columns[column] === moment ? moment + way : columns[column]);
    };
    const actions = {
      ArrowRight: () => (event.shiftKey ? go(moment + 1) : turn(1)), ArrowLeft: () => (event.shiftKey ? go(moment - 1) : turn(-1)),
      ArrowUp: () => go(moment + 1), ArrowDown: () => go(moment - 1), PageDown: () => jump(1), PageUp: () => jump(-1),
      Home: () => go(0), End: () => go(made.count - 1), p: () => go(made.peak), "+": () => zoom(0.5), "=": () => zoom(0.5),
      "-": () => zoom(2), 0: () => zoom(Infinity),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  const button = (text, action, id) => el("button", { type: "button", id, onclick: action }, text);
  const works = streams.length ? el("ul", { class: "legend", "aria-label": "colours of kernels" }, kindsOfWork.map((kind) => el("li", {}, swatch(WORK_COLORS[kind]), WORK_WORDS[kind] || kind))) : "";
  const elsewhere = plan.live_bytes > made.total[made.peak]
    ? el("p", { class: "notice" }, `The most live bytes of the run, ${inBytes(plan.live_bytes)}, are outside of this step: ${plan.peak.text}. Their tensors are listed below the step.`) : "";
  return section(options.title,
    el("p", {}, timed
      ? options.intro
      : "The last planned step of one rank. The speed of this device is not known, so the axis counts allocations and frees, and there are no streams."),
    step.has_graph ? el("p", { class: "notice" }, "A CUDA graph does the work of this step. Its memory stays reserved from its capture on, and the picture shows what is live beside it.") : "",
    elsewhere,
    el("ul", { class: "legend", "aria-label": "colours of owners" }, used.map((g) => el("li", {}, swatch(`var(--g${g % 7})`), step.groups[g]))),
    works, plot,
    el("div", { class: "buttons" }, button("Go to the peak", () => go(made.peak), `${options.id}to-peak`), button("Zoom in", () => zoom(0.5)), button("Zoom out", () => zoom(2)), button("Whole step", () => zoom(Infinity))),
    el("p", { class: "soft small", id: `${options.id}step-keys` }, "Click on a moment. Or give the picture the focus: arrow left and right move, arrow up and down go to the next and the previous allocation, page up and down move far, P goes to the peak, + and - zoom, 0 shows the whole step."),
    readout, owners, tensors,
    step.small.length ? soft(`Blocks below ${inBytes(step.small_bytes)} are drawn together, by owner.`) : "",
    soft(options.note),
    plan.tensors && elsewhere ? details("The tensors at the peak of the run", tensorTable(`Live at the run's peak: ${plan.peak.text}`, plan.tensors, true)) : "");
};
