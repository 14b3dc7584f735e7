// A plan: whether the job fits, its memory and its speed, and the settings that a search has planned.
const ANSWERS = { yes: ["Yes, it fits", "good"], barely: ["Barely", "warn"], no: ["No, it does not fit", "bad"] };

const verdictSection = (plan) => {
  const [answer, tone] = ANSWERS[plan.fits] || [plan.fits, "warn"];
  const speed = plan.speed;
  const rows = [
    ["does it fit?", el("span", { class: tone }, answer), plan.left_bytes >= 0 ? `${inBytes(plan.left_bytes)} are left` : `${inBytes(-plan.left_bytes)} are missing`],
    ["reserved memory", inBytes(plan.reserved_bytes), `of ${inBytes(plan.room_bytes)} for PyTorch's allocator`],
    ["live at the peak", inBytes(plan.live_bytes), plan.peak.text],
  ];
  if (speed) {
    if (speed.tokens_per_second) rows.push(["tokens/s on each device", whole(speed.tokens_per_second[1]), range(speed.tokens_per_second, whole)]);
    rows.push(["time of a step", inTime(speed.step_seconds[1]), range(speed.step_seconds, inTime)]);
    if (isNumber(speed.mfu)) rows.push(["MFU", percent(speed.mfu), "the model's operations by the device's peak"]);
  }
  const empties = plan.retries || plan.retries_each_step
    ? el("p", { class: "notice" }, `PyTorch's allocator empties its cache ${whole(plan.retries)} times at the beginning, and ${whole(plan.retries_each_step)} times in each later step. The host waits for the GPU each time.`) : "";
  const assumed = Object.entries(plan.assumed || {});
  return el("div", {}, figures(rows), empties,
    assumed.length ? el("p", {}, "Assumed, since nobody gave these values: ", optionsOf(plan.assumed)) : "");
};

const memorySection = (plan) => {
  const runtime = plan.runtime_bytes[1];
  const parts = [
    ...Object.entries(plan.exact).map(([name, nbytes]) => [name, nbytes, "exact", name]),
    ...Object.entries(plan.traced).map(([name, nbytes]) => [name, nbytes, "traced", name]),
  ].filter(([, nbytes]) => nbytes > 0);
  const order = Object.keys(GROUP_WORDS);
  const colored = parts.map(([name, nbytes, how, group]) => [GROUP_WORDS[group] || name, nbytes, how, `var(--g${Math.max(0, order.indexOf(group))})`]);
  colored.push(["cache: reserved, and not live when most is reserved", plan.cached_bytes, "modelled", "var(--line)"]);
  colored.push(["runtime: CUDA context and NCCL, the most", runtime, "by experience", "var(--soft)"]);
  const sum = colored.reduce((all, [, nbytes]) => all + nbytes, 0);
  const scale = Math.max(sum, plan.room_bytes + runtime);
  let at = 0;
  const bar = el("div", { class: "bar", role: "img", "aria-label": `${inBytes(sum)} of ${inBytes(plan.room_bytes + runtime)}; the table below has the parts` },
    colored.map(([, nbytes, , color]) => {
      const part = styled(el("span"), { left: `${(100 * at) / scale}%`, width: `${(100 * nbytes) / scale}%`, background: color });
      at += nbytes;
      return part;
    }));
  bar.style.height = "22px";
  const phases = Object.entries(plan.phases || {});
  const host = Object.entries(plan.host || {});
  return section("Memory at the peak of the run",
    el("p", {}, `The bar is ${inBytes(scale)} long${sum > plan.room_bytes + runtime ? `, more than the ${inBytes(plan.room_bytes + runtime)} of this device` : ": all that this rank may use"}.`),
    bar,
    table("Memory of one device", [["part"], ["how it is known"], ["bytes", true], ["of the device", true]],
      colored.map(([name, nbytes, how, color]) => [el("span", {}, swatch(color), name), how, inBytes(nbytes), percent(nbytes / (plan.room_bytes + runtime))])),
    phases.length > 1 ? table("Most live bytes of each part of the run", [["part"], ["device", true], ["host", true]], phases.map(([name, each]) => [name, inBytes(each.live_bytes), inBytes(each.host_bytes)])) : "",
    host.length ? table("Memory of the host for each rank", [["part"], ["bytes", true]], host.map(([name, nbytes]) => [name, inBytes(nbytes)])) : "",
    plan.edits && plan.edits.length ? table("Changes that save the most memory", [["change"], ["fits?"], ["reserved", true], ["saves", true], ["step", true]],
      plan.edits.map((edit) => [el("code", {}, edit.keys), edit.fits, inBytes(edit.reserved_bytes), inBytes(plan.unlimited_reserved_bytes - edit.unlimited_reserved_bytes), inTime(edit.step_seconds)])) : "");
};

// The losses as bars, each from where the one before ended.
const waterfall = (caption, losses, speed) => {
  const sum = losses.reduce((all, loss) => all + loss.seconds, 0);
  const length = Math.max(sum, ...losses.map((_, i) => losses.slice(0, i + 1).reduce((all, loss) => all + loss.seconds, 0)));
  let at = 0;
  const rows = losses.map((loss) => {
    const before = at;
    at += loss.seconds;
    if (Math.abs(loss.seconds) < 1e-9 * sum) return null;
    const bar = el("div", { class: "bar", "aria-hidden": "true" }, styled(el("span"), {
      left: `${(100 * Math.min(before, at)) / length}%`, width: `${(100 * Math.abs(loss.seconds)) / length}%`,
      background: loss.name === "peak" ? "var(--c2)" : loss.seconds < 0 ? "var(--c5)" : "var(--c1)",
    }));
    return [
      el("div", {}, loss.text, bar), `${loss.seconds < 0 ? "-" : ""}${inTime(Math.abs(loss.seconds))}`, percent(loss.seconds / sum),
      loss.setting ? el("code", {}, loss.setting) : loss.name === "peak" ? "the device" : "none",
      speed.tokens ? whole(speed.tokens / at) : "not known", speed.operations ? digits(speed.operations / at / 1e12) : "not known",
    ];
  }).filter(Boolean);
  return table(caption, [["part of a step"], ["time", true], ["share", true], ["moved by"], ["tokens/s left", true], ["TFLOP/s left", true]], rows, { id: "waterfall" });
};

const speedSection = (plan) => {
  const speed = plan.speed;
  if (!speed) return section("From peak FLOP/s to tokens/s", el("p", {}, "The speed of this device is not known, so this plan has no times."));
  const losses = plan.losses;
  const first = losses[0];
  return section("From peak FLOP/s to tokens/s",
    el("p", {}, `At the device's peak a step would take ${inTime(first.seconds)}. Each row below is time that a step takes beside this, with the setting that changes it most. All rows together are the ${inTime(speed.step_seconds[1])} of a step. The last columns say what rate is left after each loss, on each device.`),
    waterfall("Where the time of a step goes", losses, { tokens: plan.tokens, operations: plan.model_flops }),
    Object.keys(speed.collectives_seconds || {}).length ? table("Collectives, hidden behind computation or not", [["stream"], ["time in a step", true]], Object.entries(speed.collectives_seconds).map(([name, seconds]) => [name, inTime(seconds)])) : "");
};

const frontierSection = (plan) => {
  const grid = plan.grid;
  const order = grid.plans.map((_, i) => i).sort((i, k) => grid.plans[i].step_seconds - grid.plans[k].step_seconds);
  const fitting = order.filter((i) => grid.plans[i].fits);
  const front = [];
  for (const i of fitting) if (!front.length || grid.plans[i].reserved_bytes < grid.plans[front[front.length - 1]].reserved_bytes) front.push(i);
  const rateOf = (each) => each.tokens_per_second;
  const most = Math.max(...grid.plans.map((each) => each.reserved_bytes));
  const isFar = plan.room_bytes > 3 * most;
  const isOff = grid.plans.some((each) => each.reserved_bytes > 2.12 * plan.room_bytes);
  const words = (each) => grid.dimensions.map((dimension, d) => `${dimension.name.slice(dimension.name.indexOf(".") + 1)} ${dimension.values[each.at[d]]}`).join(", ") || "the job as it is";
  let at = (front.length ? grid.plans[front[0]] : grid.plans[order[0]]).at.slice();
  const found = () => grid.plans.findIndex((each) => each.at.every((value, d) => value === at[d]));

  const plot = el("div", { class: "plot", id: "frontier" });
  const report = el("div", { id: "planned", "aria-live": "polite" });
  const losses = el("div", {});
  const all = el("div", {});
  const sliders = grid.dimensions.map((dimension, d) => {
    const id = `dimension-${d}`;
    const value = el("output", { for: id });
    const input = el("input", { type: "range", id, min: 0, max: dimension.values.length - 1, step: 1, oninput: () => { at[d] = Number(input.value); show(); } });
    return { input, value, label: el("div", {}, el("label", { for: id }, `${dimension.name}: `, value), input) };
  });
  const choose = (i) => { at = grid.plans[i].at.slice(); show(); };

  const draw = (width) => {
    const height = 330;
    const picture = svg("svg", { width, height, role: "img", "aria-label": "Planned settings: reserved memory across, tokens per second upwards. The table below has all of them." });
    const box = { left: 62, top: 24, width: width - 86, height: height - 66 };
    const high = Math.min(Math.max(most, isFar ? 0 : plan.room_bytes), 2 * plan.room_bytes) * 1.06;
    const [unit, size] = unitOf(high);
    const rates = grid.plans.map(rateOf);
    const [atX, atY] = axes(picture, box,
      { low: 0, high: high / size, title: `reserved memory of a device (${unit})`, words: digits },
      { low: 0, high: Math.max(...rates) * 1.08, title: "tokens/s on each device", words: whole });
    const x = (each) => atX(Math.min(each.reserved_bytes, high) / size);
    if (!isFar) {
      picture.append(svg("line", { class: "limit", x1: atX(plan.room_bytes / size), x2: atX(plan.room_bytes / size), y1: box.top, y2: box.top + box.height }));
      picture.append(svg("text", { x: atX(plan.room_bytes / size) - 5, y: box.top + box.height - 8, "text-anchor": "end" }, `room: ${inBytes(plan.room_bytes)}`));
    }
    const line = front.map((i, k) => {
      const each = grid.plans[i];
      return k ? `V${atY(rateOf(each)).toFixed(1)}H${x(each).toFixed(1)}` : `M${x(each).toFixed(1)},${atY(rateOf(each)).toFixed(1)}`;
    });
    picture.append(svg("path", { d: line.join(""), fill: "none", stroke: "var(--c0)", "stroke-width": 1.5, "stroke-dasharray": "5 3" }));
    const chosen = found();
    grid.plans.forEach((each, i) => {
      const color = each.fits ? "var(--c0)" : "var(--c1)";
      const circle = svg("circle", { cx: x(each), cy: atY(rateOf(each)), r: i === chosen ? 8 : 5.5, fill: each.fits ? color : "var(--ground)", stroke: i === chosen ? "var(--text)" : color, "stroke-width": 2 }, svg("title", {}, `${words(each)}: ${inBytes(each.reserved_bytes)}, ${whole(rateOf(each))} tokens/s`));
      circle.style.cursor = "pointer";
      circle.addEventListener("click", () => choose(i));
      picture.append(circle);
    });
    return picture;
  };
  const again = responsive(plot, draw);
  const show = () => {
    sliders.forEach(({ input, value }, d) => {
      const text = grid.dimensions[d].values[at[d]];
      input.value = at[d];
      input.setAttribute("aria-valuetext", text);
      value.textContent = text;
    });
    const i = found();
    if (i < 0) {
      report.replaceChildren(el("p", { class: "notice" }, "These settings were not planned: they do not go together, or another plan makes them needless. A plan that fits makes those needless that are smaller and slower; one that does not fit, those that are larger."));
      losses.replaceChildren();
    } else {
      const each = grid.plans[i];
      const best = front.length ? grid.plans[front[0]] : null;
      report.replaceChildren(figures([
        ["these settings", el("span", { class: each.fits ? "good" : "bad" }, each.fits ? "fit" : "do not fit"), i === front[0] ? "the fastest that fit" : each.is_job ? "the job as it is" : ""],
        ["reserved memory", inBytes(each.reserved_bytes), `of ${inBytes(plan.room_bytes)}`],
        ["tokens/s on each device", whole(rateOf(each)), best && each !== best ? `${rateOf(each) > rateOf(best) ? "+" : ""}${percent(rateOf(each) / rateOf(best) - 1)} beside the fastest that fit` : ""],
        ["time of a step", inTime(each.step_seconds), ""],
      ]), el("p", {}, "Keys: ", Object.keys(each.keys).length ? optionsOf(each.keys) : "those of the job"));
      losses.replaceChildren(waterfall("Where the time of a step goes with these settings", each.losses, { tokens: each.tokens_per_second * each.step_seconds, operations: plan.model_flops }));
      losses.querySelector("table").id = "waterfall-chosen";
    }
    all.replaceChildren(table("All plans of the search, the fastest first", [["settings"], ["fits"], ["reserved", true], ["tokens/s", true], ["step", true]],
      order.map((k) => {
        const each = grid.plans[k];
        return [el("button", { type: "button", class: "link", "aria-current": k === i ? "true" : null, onclick: () => choose(k) }, words(each)), each.fits ? (front.includes(k) ? "yes, frontier" : "yes") : "no", inBytes(each.reserved_bytes), whole(rateOf(each)), inTime(each.step_seconds)];
      }), { chosen: (k) => order[k] === i, id: "plans" }));
    again();
  };
  show();
  const failed = grid.failed.length ? table("Settings whose plans failed", [["settings"], ["error"]], grid.failed.map((each) => [el("span", {}, optionsOf(each.keys)), each.error])) : "";
  return section("Memory against speed",
    el("p", {}, `The search has made ${whole(grid.plans.length)} plans; ${whole(fitting.length)} of them fit. The dashed line joins those for which no other one is both faster and smaller. The step and the figures above are of ${grid.shown}.`),
    isFar ? el("p", {}, `The room of the device, ${inBytes(plan.room_bytes)}, is far to the right of this picture.`) : "",
    isOff ? el("p", {}, "Plans that need more than twice the room stand at the right edge.") : "",
    el("ul", { class: "legend" }, keyOf({ name: "fits", marks: true, color: "var(--c0)" }), keyOf({ name: "does not fit", marks: true, hollow: true, color: "var(--c1)" }), keyOf({ name: "frontier", color: "var(--c0)", dash: "5 3" })),
    plot, el("h3", {}, "Choose settings"), el("div", { class: "controls" }, sliders.map(({ label }) => label)), report, losses, all, failed);
};

const planPage = (data) => {
  const plan = data.plan;
  return [
    el("h1", {}, data.title), el("p", {}, data.head.join(" · ")),
    ...[verdictSection, memorySection, stepSection, speedSection].map((draw) => attempt(() => draw(plan))),
    plan.grid ? attempt(() => frontierSection(plan)) : "",
  ];
};
