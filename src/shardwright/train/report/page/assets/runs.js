// Runs: their figures over steps, what happened to them, their settings, their plan, and how they differ.
const nameOf = (data, i) => (data.runs.length > 1 ? `${i + 1}. ${data.runs[i].name}` : data.runs[i].name);
const curveOf = (data, i, key, more = {}) => ({
  name: data.runs.length > 1 ? nameOf(data, i) : more.label || "run", color: colorOf(i), dash: DASHES[(i + Math.floor(i / 7)) % 7], points: (data.runs[i].curves[key] || []).map(([x, y]) => [x, y / (more.size || 1)]), ...more.style,
  ...(data.runs.length > 1 && more.label ? { name: `${nameOf(data, i)}, ${more.label}` } : {}),
});
const columnsOf = (data, number) => data.runs.map((_, i) => [data.runs.length > 1 ? nameOf(data, i) : "value", number]);
const STEP = "optimizer step";
const NATS = "cross-entropy per token (nats)";
const SET = "validation_loss/"; // begins the name of the loss on a set in the results
const moment = (time) => (time ? String(time).replace("T", " ").replace("+00:00", " UTC") : "");

// Steps after which sessions of a run went on, if the page has one run.
const beginsOf = (data) => (data.runs.length > 1 ? [] : data.runs[0].sessions.slice(1).map((each) => each.from_step).filter(isNumber));
const beginsNote = (data) => (beginsOf(data).length ? soft(`At a dotted vertical line a later session begins: after step ${beginsOf(data).map(whole).join(", ")}.`) : "");

const chart = (data, title, keys, options) => {
  const series = [];
  data.runs.forEach((_, i) => keys.forEach(([key, label, style]) => {
    const own = curveOf(data, i, key, { label, style, size: options.size });
    if (data.runs.length === 1 && keys.length > 1 && !style) {
      const k = keys.findIndex(([each]) => each === key);
      Object.assign(own, { color: colorOf(k), dash: DASHES[Math.floor(k / 7) % 7] });
    }
    series.push(own);
  }));
  return lineChart({ title, x: STEP, series, words: digits, legend: keys.length > 1, begins: beginsOf(data), ...options });
};

// Objects whose numbers have a chart each, also beside those of other runs: its kind, its style, its unit.
const CHART_OF_EACH = {
  validation_losses: ["loss on a validation set", { marks: true }, NATS], extra_losses: ["further loss"], metrics: ["metric of steps"],
  validation_metrics: ["metric of validations", { marks: true }], tasks: ["task", { marks: true }],
};

const chartsOf = (data) => {
  const [memoryUnit, memorySize] = unitOf(Math.max(...data.runs.flatMap((run) => (run.curves.memory_reserved || []).map(([, y]) => y)), 1));
  const keys = new Set(data.runs.flatMap((run) => Object.keys(run.curves)));
  const under = (prefix) => [...keys].filter((key) => key.startsWith(prefix)).sort();
  const only = (prefix, key) => key.slice(prefix.length);
  const made = [
    chart(data, "Loss", [["loss", "training, before the step's update"], ["validation_loss", "validation, after the update", { marks: true, hollow: true }]], { y: NATS, words: inNats, axis: digits }),
    data.runs.length > 1 ? lineChart({
      title: `Difference from the loss of ${nameOf(data, 0)}`, x: STEP, y: "|difference| / loss (%)", words: (value) => `${digits(value)}%`, axis: digits, zero: true, legend: true,
      series: data.runs.map((_, i) => curveOf(data, i, "difference")).slice(1),
      note: "0 means that the losses are equal in every bit.",
    }) : null,
    chart(data, "Throughput of all ranks", [["tokens_per_second", "tokens/s"]], { y: "tokens per second", zero: true }),
    chart(data, "Gradient norm before clipping", [["grad_norm", "norm over all ranks"]], { y: "norm", zero: true }),
    chart(data, "Memory of rank 0", [["memory_active", data.runs[0].on_gpu ? "tensors, peak of the step" : "process now"], ["memory_reserved", data.runs[0].on_gpu ? "held by PyTorch's allocator" : "process, peak so far", { dash: "2 3" }]], { y: `memory (${memoryUnit})`, zero: true, size: memorySize, words: (value) => `${digits(value)} ${memoryUnit}`, axis: digits }),
    chart(data, "Learning rate", [["lr", "rate"]], { y: "learning rate", zero: true }),
  ];
  // Other objects of numbers, such as the parts of a step: a chart for each, of one run.
  const others = [...new Set([...keys].filter((key) => key.includes("/")).map((key) => key.slice(0, key.indexOf("/"))))];
  for (const name of others.filter((each) => !(each in CHART_OF_EACH) || (each === "validation_losses" && data.runs.length === 1))) {
    const own = name === "parts" ? Object.keys(data.runs[0].split).map((part) => `parts/${part}`).filter((key) => keys.has(key)) : under(`${name}/`);
    const titles = {
      parts: ["Parts of a step", "seconds"], validation_losses: ["Validation loss by set", NATS],
      validation_perplexities: ["Perplexity by validation set", "e to the power of the loss"],
    };
    const [title, y] = titles[name] || [name.replaceAll("_", " "), "value"];
    if (data.runs.length === 1) made.push(chart(data, title, own.slice(0, 12).map((key) => [key, only(`${name}/`, key)]), { y, zero: true, note: own.length > 12 ? `The first 12 of ${own.length}.` : "" }));
  }
  for (const [name, [kind, style, y]] of Object.entries(CHART_OF_EACH)) {
    if (name === "validation_losses" && data.runs.length === 1) continue; // one chart has all sets of one run
    for (const key of under(`${name}/`)) made.push(chart(data, `${only(`${name}/`, key)} (${kind})`, [[key, only(`${name}/`, key), style]], { y: y || "value" }));
  }
  return el("div", { class: "charts" }, made);
};

// Seconds of a step by part, as medians. The rest of the step is what no part has.
const splitSection = (data) => {
  const parts = [...new Set(data.runs.flatMap((run) => Object.keys(run.split)))];
  if (!parts.length) return "";
  const seconds = data.runs.map((run) => run.step_seconds);
  const colors = parts.map((_, k) => (parts.length === 2 && k ? "var(--c6)" : colorOf(k)));
  const bars = data.runs.map((run, i) => {
    let at = 0;
    const length = Math.max(...seconds.filter(isNumber));
    const bar = el("div", { class: "bar", "aria-hidden": "true" }, parts.map((part, k) => {
      const own = styled(el("span"), { left: `${(100 * at) / length}%`, width: `${(100 * (run.split[part] || 0)) / length}%`, background: colors[k] });
      at += run.split[part] || 0;
      return own;
    }));
    bar.style.height = "18px";
    return el("div", {}, el("div", { class: "small" }, `${nameOf(data, i)}: ${inTime(run.step_seconds)}`), bar);
  });
  return section("Where the time of a step went",
    el("p", {}, "Means over the timed steps: all but the first three of each session."), el("ul", { class: "legend" }, parts.map((part, k) => el("li", {}, swatch(colors[k]), part))), bars,
    table("Seconds of a step by part", [["part"], ...columnsOf(data, true)], parts.map((part) => [part, ...data.runs.map((run) => (isNumber(run.split[part]) ? `${inTime(run.split[part])}, ${percent(run.split[part] / run.step_seconds)}` : "-"))])));
};

// The perplexity of the last validation, then the loss and the perplexity on each set. Without the first one the loss is
// not a cross-entropy.
const perplexityRows = (data) => {
  const sets = [...new Set(data.runs.flatMap((run) => Object.keys(run.results.metrics || {})))].filter((name) => name.startsWith(SET));
  const loss = (run, set) => (run.results.metrics || {})[set];
  const rows = sets.flatMap((set) => [
    [`validation loss on ${set.slice(SET.length)}`, (run) => (isNumber(loss(run, set)) ? inNats(loss(run, set)) : "none")],
    [`perplexity on ${set.slice(SET.length)}`, (run) => (isNumber(run.results.perplexity) && isNumber(loss(run, set)) ? digits(Math.exp(loss(run, set))) : "none")],
  ]);
  if (!data.runs.some((run) => isNumber(run.results.perplexity))) return rows.filter((_, i) => i % 2 === 0);
  return [["perplexity, last", (run) => (isNumber(run.results.perplexity) ? digits(run.results.perplexity) : "none")], ...rows];
};

const resultsSection = (data) => {
  const rows = [
    ["status", (run) => run.status || "not known"], ["steps", (run) => whole(run.steps)],
    ["training loss, last (nats per token)", (run) => inNats(run.results.train_loss)],
    ["validation loss, last (nats per token)", (run) => (isNumber(run.results.validation_loss) ? inNats(run.results.validation_loss) : "none")],
    ...perplexityRows(data),
    ["tokens/s of all ranks, median", (run) => whole(run.results.tokens_per_second)],
    ["time of a step, median", (run) => inTime(run.results.step_seconds)],
    ["waiting for data", (run) => percent(run.results.data_share)],
    ["peak memory of the rank with most", (run) => inBytes(run.results.peak_memory)],
    ["held by the engine between steps", (run) => inBytes(run.results.held_memory)],
    ["leased by the engine for a step, at most", (run) => inBytes(run.results.leased_memory)],
    ["parameters", (run) => whole(run.parameters)],
  ];
  if (data.runs.length > 1) rows.push([`largest difference of the loss from ${nameOf(data, 0)}`, (run, i) => (i ? (isNumber(run.largest_difference) ? (run.largest_difference ? `${digits(100 * run.largest_difference)}%, at step ${whole(run.largest_at)}` : "equal at every step") : "no step in common") : "-")]);
  const made = table("Figures of the whole run", [["figure"], ...columnsOf(data, true)], rows.map(([name, value]) => [name, ...data.runs.map(value)]), { id: "results" });
  if (data.runs.every((run) => run.sessions.length < 2)) return made;
  return el("div", {}, made, soft("If a run has several sessions, times are medians over the sessions with the engine, ranks, device and dtypes of the last one. Memory is of the last session alone."));
};

const planRows = (run) => {
  const { plan, results } = run;
  const rows = [["does it fit?", plan.fits || "not known", run.out_of_memory ? "it was out of memory" : run.status || "not known", ""]];
  const against = (planned, measured) => (isNumber(planned) && isNumber(measured) && measured > 0 ? `${planned >= measured ? "+" : ""}${percent(planned / measured - 1)}` : "");
  const measured = run.on_gpu ? results.peak_memory : NaN;
  rows.push(["reserved memory, rank with most", inBytes(plan.reserved_bytes), run.on_gpu ? inBytes(measured) : "not on a GPU", against(plan.reserved_bytes, measured)]);
  const exact = plan.exact || {};
  const state = (exact.parameters || 0) + (exact.optimizer || 0);
  rows.push(["parameters and optimizer state", inBytes(state), inBytes(results.held_memory), against(state, results.held_memory)]);
  const speed = plan.speed;
  if (speed && speed.step_seconds) {
    rows.push(["time of a step", `${inTime(speed.step_seconds[1])} ${range(speed.step_seconds, inTime)}`, inTime(results.step_seconds), run.on_gpu ? against(speed.step_seconds[1], results.step_seconds) : ""]);
    const all = speed.tokens_per_second ? speed.tokens_per_second[1] * plan.ranks : NaN;
    rows.push(["tokens/s of all ranks", whole(all), whole(results.tokens_per_second), run.on_gpu ? against(all, results.tokens_per_second) : ""]);
  }
  if (plan.peak) rows.push(["the most live bytes", `${inBytes(plan.live_bytes)}: ${plan.peak.text}`, "not measured", ""]);
  return rows;
};
const planSection = (data) => section("Plan beside reality", data.runs.map((run, i) => (run.plan
  ? el("div", {}, table(`${nameOf(data, i)}: planned for ${run.plan.ranks} x ${run.plan.device}`, [["figure"], ["planned"], ["measured"], ["plan beside it", true]], planRows(run)), run.on_gpu ? "" : soft("The run was not on a GPU, and the plan is for one: times and reserved memory do not compare."))
  : el("p", {}, `${nameOf(data, i)}: no plan was made beside this run. On GPUs run.plan makes one; on the CPU run.plan_device names the device to plan for.`))));

// Gradient norms by unit: a picture of all, and the units that grew most.
const normsSection = (data) => {
  const norms = data.runs.length === 1 ? data.runs[0].norms : null;
  if (!norms) return "";
  const { units, columns, rows } = norms;
  const facts = units.map((unit, i) => {
    const finite = rows[i].filter((value) => value !== null && value >= 0);
    const sorted = [...finite].sort((a, b) => a - b);
    const median = sorted[Math.floor(sorted.length / 2)];
    const largest = sorted[sorted.length - 1];
    const wrong = rows[i].findIndex((value) => value < 0);
    return { unit, median, largest, at: rows[i].indexOf(largest), wrong, growth: wrong >= 0 ? Infinity : median > 0 ? largest / median : 0 };
  }).sort((a, b) => (a.wrong < 0 ? Infinity : a.wrong) - (b.wrong < 0 ? Infinity : b.wrong) || b.growth - a.growth);
  const stepAt = (column) => (column < 0 ? "-" : columns[column][0] === columns[column][1] ? whole(columns[column][0]) : `${whole(columns[column][0])} to ${whole(columns[column][1])}`);
  return section("Gradient norms by unit",
    el("p", {}, "Norms over all ranks, before clipping. The square root of the sum of their squares is the gradient norm of the step. A unit that turns bright, or is not finite, before the others is the first to look at."),
    el("p", {}, "A unit of several modules has the name of its first module. The last norm and the head are often one unit, which has the name of the norm. The root holds all other parameters, and has the name of the model's class."),
    heatMap({ id: "unit-norms", title: "Gradient norm of each unit", rows: units, columns, values: rows, begins: beginsOf(data) }),
    beginsNote(data),
    norms.more_units ? soft(`The ${whole(units.length)} units with the largest norms; ${whole(norms.more_units)} more are in unit_norms.jsonl.`) : "",
    norms.left_out && norms.left_out.length ? soft(`The picture also has norms of steps that were left out because of a fault. Such a column is before that of the same step when it was made: ${norms.left_out.slice(0, 20).map(whole).join(", ")}${norms.left_out.length > 20 ? ", …" : ""}.`) : "",
    columns.some(([first, last]) => first !== last) ? soft("A column has several records, and shows the largest norm of each unit among them.") : "",
    table("Units whose norm grew most above their median", [["unit"], ["median", true], ["largest", true], ["at step", true], ["largest / median", true], ["not finite at step", true]],
      facts.slice(0, 8).map((each) => [each.unit, isNumber(each.median) ? digits(each.median) : "-", isNumber(each.largest) ? digits(each.largest) : "-", stepAt(each.at), isNumber(each.median) && each.median > 0 ? digits(each.largest / each.median) : "-", stepAt(each.wrong)]), { id: "unit-growth" }));
};

// The notes of an early step: what the engine has leased, and the collectives of the host.
const notesSection = (data) => {
  const step = data.runs.length === 1 ? data.runs[0].noted : null;
  if (!step || !step.taken.length) return "";
  return stepSection({ step, room_bytes: 0, live_bytes: 0 }, {
    id: "noted-", title: "A step as it ran: leases, phases, collectives and streams", axis: "as measured", memory: "leased memory", state: "leased", leases: true, words: LEASE_WORDS,
    intro: `Step ${whole(step.step)} of rank ${whole(step.rank)}. Above, what the engine leases for the step: gathered parameters, gradients and reductions, without activations and without what stays between steps. Below, phases of the host, its begins of collectives, and its waits for them, and the engine's own streams: on a GPU their work by the device's time, else from the host's begin to its wait.`,
    note: `Each lease and each release is a moment. A column of pixels shows the moment with the most leased bytes.${step.left_out ? ` The last ${whole(step.left_out)} notes of this step were left out.` : ""}`,
  });
};

const incidentsSection = (data) => section("What happened", data.runs.map((run, i) => (run.incidents.length
  ? table(`${nameOf(data, i)}: faults, restarts and steps that were left out`, [["step"], ["what"], ["description"], ["time"]], run.incidents.map((each) => [isNumber(each.step) ? whole(each.step) : "-", each.what, each.text, moment(each.time) || "-"]))
  : el("p", {}, `${nameOf(data, i)}: no fault, no restart, and no step was left out.`))));

const sessionsSection = (data) => section("Environment", data.runs.map((run, i) => el("div", {},
  run.sessions.length ? table(`${nameOf(data, i)}: sessions, each from a start or a resume to its end`, [["start"], ["steps"], ["end"], ["ranks", true], ["device"], ["engine"], ["dtypes"], ["versions"]],
    run.sessions.map((each) => [
      moment(each.start) || "not known", `${whole(each.from_step)} to ${isNumber(each.to_step) ? whole(each.to_step) : "?"}`, `${each.status || "not known"}${each.end ? `, ${moment(each.end)}` : ""}`, whole(each.ranks),
      `${each.device_name || each.device || "not known"}, ${whole(each.threads)} ${each.threads === 1 ? "thread" : "threads"}`, [each.engine, each.strategy, each.layout, each.memory].filter(Boolean).join(", "),
      `${each.param_dtype || "?"}, reduced in ${each.reduce_dtype || "?"}`, Object.entries(each.versions || {}).map(([name, version]) => `${name} ${version}`).join(", "),
    ])) : el("p", {}, `${nameOf(data, i)}: run.json has no sessions.`),
  run.memory_text ? details("memory.txt: memory of rank 0 by owner", styled(el("pre", {}, run.memory_text), { overflowX: "auto" })) : "")));

const settingsSection = (data) => {
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.settings)))];
  const values = (key) => data.runs.map((run) => (key in run.settings ? el("code", {}, run.settings[key]) : "-"));
  const columns = [["setting"], ...columnsOf(data, false)];
  const differ = data.differences;
  return section("Settings",
    data.runs.length > 1 ? (differ.length ? table("Settings and facts that differ", columns, differ.map((each) => [each.key, ...each.values.map((value) => (value === null ? "-" : el("code", {}, value)))]), { id: "differences" }) : el("p", {}, "The runs have the same settings.")) : "",
    keys.length ? details(`All ${whole(keys.length)} settings`, table("Settings of the last start", columns, keys.map((key) => [key, ...values(key)]))) : el("p", {}, "No settings could be read."));
};

const runsPage = (data) => {
  const run = data.runs[0];
  const single = data.runs.length === 1;
  const tone = { finished: "good", interrupted: "warn", failed: "bad" }[run.status] || "warn";
  return [
    el("h1", {}, data.title),
    single ? el("p", { class: "soft" }, run.folder) : el("ul", {}, data.runs.map((each, i) => el("li", {}, `${nameOf(data, i)}: ${each.folder}`))),
    ...data.runs.flatMap((each, i) => each.notices.map((text) => el("p", { class: "notice" }, single ? text : `${nameOf(data, i)}: ${text}`))),
    single ? figures([
      ["status", el("span", { class: tone }, run.status || "not known"), moment(run.end)], ["steps", whole(run.steps), ""],
      ["training loss", inNats(run.results.train_loss), "nats per token, last step"], ["validation loss", isNumber(run.results.validation_loss) ? inNats(run.results.validation_loss) : "none", "nats per token, last"],
      ["throughput", whole(run.results.tokens_per_second), "tokens/s of all ranks, median"], ["peak memory", inBytes(run.results.peak_memory), "rank with most"],
    ]) : "",
    attempt(() => section("Results", resultsSection(data))),
    attempt(() => section("Figures over steps", data.runs.some((each) => Object.keys(each.curves).length) ? chartsOf(data) : el("p", {}, "No step is recorded."),
      beginsNote(data),
      data.thinned ? soft(`Curves are thinned to at most ${whole(data.thinned)} points. Each part of a curve keeps its least and its largest value.`) : "",
      data.runs.map((each, i) => (each.table.length ? details(`${nameOf(data, i)}: figures as a table, ${whole(each.table.length)} of ${whole(each.steps)} steps`,
        table(`${nameOf(data, i)}: figures of steps`, [["step"], ["loss", true], ["validation", true], ["norm", true], ["tokens/s", true], ["time", true], ["memory", true]],
          each.table.map((row) => [whole(row[0]), inNats(row[1]), row[2] === null ? "-" : inNats(row[2]), row[3] === null ? "-" : digits(row[3]), whole(row[4]), inTime(row[5]), inBytes(row[6])]))) : "")))),
    ...[normsSection, splitSection, notesSection, incidentsSection, planSection, settingsSection, sessionsSection].map((draw) => attempt(() => draw(data))),
  ];
};
