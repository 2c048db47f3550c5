// The page of one run, or of two: facts, curves, time, samples, config, events.
(() => {
  const { runs, panels, constants, live } = JSON.parse(document.getElementById("data").textContent);
  for (const appended of document.querySelectorAll("script.step")) {
    let row = null;
    try { row = JSON.parse(appended.textContent); } catch { /* a kill has cut it off */ }
    if (row) extend(runs[0], row);
  }
  const main = document.getElementById("main"), places = document.getElementById("places"), two = runs.length > 1;
  if (two && runs[0].name === runs[1].name) { for (const run of runs) run.name = run.folder; document.title = runs.map((run) => run.name).join(" and "); }
  const clock = (time) => new Date(1000 * time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
  function section(title, note) {
    const made = make("section"), id = title.toLowerCase().replace(/[^a-z]+/g, "-"), link = make("a", "", title);
    made.id = id; link.href = `#${id}`; places.append(link);
    made.append(make("h2", "", title));
    if (note) made.append(make("p", "soft small", note));
    main.append(made);
    return made;
  }

  // A step that was appended after the page was written. `count`: how many values the last place of a metric has.
  function extend(run, { step, time, metrics }) {
    const first = step - (step % run.width), last = () => run.steps.length - 1;
    if (run.steps[last()] !== first) {
      run.steps.push(first);
      for (const data of Object.values(run.metrics)) { data.count = 0; for (const key of ["y", "low", "high"]) data[key]?.push(null); }
    }
    const place = last();
    for (const [name, data] of Object.entries(run.metrics)) {
      const value = metrics[name];
      if (value === null) data.lost = [...(data.lost ?? []), place];
      if (!isNumber(value)) continue;
      data.y[place] = Number((((data.y[place] ?? 0) * data.count + value) / (data.count + 1)).toPrecision(6));
      data.count += 1;
      if (data.low) { data.low[place] = Math.min(data.low[place] ?? value, value); data.high[place] = Math.max(data.high[place] ?? value, value); }
    }
    run.updated = time;
    run.done = Math.min(step + 1, run.total ?? step + 1);
    if (isNumber(run.secondsLeft)) run.secondsLeft = run.stepSeconds * (run.total - run.done);
  }

  // -- the head ------------------------------------------------------------------------------------------------------
  const STATES = { running: "calm", done: "right", stopped: "mark", stalled: "wrong", failed: "wrong" };
  function head() {
    const top = document.getElementById("top");
    top.append(make("h1", "", runs.map((run) => run.name).join(" and ")));
    for (const [which, run] of runs.entries()) {
      const line = make("p", "small"), badge = make("span", `badge ${STATES[run.state]}`, run.state);
      if (two) { const swatch = make("span", "swatch"); swatch.style.setProperty("--colour", COLOURS[which]); line.append(swatch, make("b", "", run.name), " "); }
      const written = make("span");
      line.append(badge, ` ${run.folder}, `, written);
      top.append(line);
      const show = () => showAge(run, badge, written);
      show();
      if (live && run.state === "running") setInterval(show, 10000);
      if (live && Number(run.settings["sft.steps"])) { const link = make("a", "", "the supervised warm-up"); link.href = "sft/report.html"; line.append("; ", link, " has a page of its own"); }
    }
    if (two) top.append(scrolled(table(["", ...runs.map((run) => run.name)], facts(runs[0]).map(([label], row) => [label, ...runs.map((run) => facts(run)[row][1])]))));
    else {
      const tiles = make("dl", "tiles");
      for (const [label, value] of facts(runs[0])) { const tile = make("div"); tile.append(make("dt", "", label), make("dd", "", value)); tiles.append(tile); }
      top.append(tiles);
    }
  }
  // A run that is killed leaves no event. Its own page then grows old; one that a command wrote has the last heartbeat.
  const PATIENCE_S = 600, PATIENCE_STEPS = 5, PATIENCE_START_S = 3600;
  function showAge(run, badge, written) {
    const age = Math.max(0, Date.now() / 1000 - run.updated), patience = isNumber(run.stepSeconds) ? Math.max(PATIENCE_S, PATIENCE_STEPS * run.stepSeconds) : PATIENCE_START_S;
    const ago = live && run.state === "running" ? ` (${age < 1 ? "now" : `${seconds(age < 10 ? Math.round(age) : age)} ago`})` : "";
    const isOld = live && run.state === "running" && age > patience, each = isNumber(run.stepSeconds) ? `, and a step takes ${seconds(run.stepSeconds)}` : "";
    written.textContent = `as of ${clock(run.updated)}${ago}`;
    if (isOld) written.textContent += `${each}: it hangs, or it was killed. Reload the page to see whether it goes on.`;
    else if (run.silentSince !== null) written.textContent += `; no heartbeat since ${clock(run.silentSince)}: it was probably killed`;
    else if (live && run.state === "running") written.textContent += "; reload the page for newer numbers";
    if (isOld || run.silentSince !== null) { badge.textContent = "no sign of life"; badge.className = "badge wrong"; }
  }
  function change(run, metric) {
    const y = run.metrics[metric]?.y.filter(isNumber);
    return y?.length ? (y.length > 1 ? `${short(y[0], 3)} \u2192 ${short(y[y.length - 1], 3)}` : short(y[0], 3)) : "\u2013";
  }
  function median(run, metric) {
    const y = (run.metrics[metric]?.y ?? []).filter(isNumber).sort((a, b) => a - b), half = y.length >> 1;
    return y.length ? short(y.length % 2 ? y[half] : (y[half - 1] + y[half]) / 2) : "\u2013";
  }
  function facts(run) {
    const validation = Object.keys(run.metrics).find((name) => /^val-core\/.+\/mean@\d+$/.test(name));
    return [
      ["steps", run.total === null ? run.done.toLocaleString("en") : `${run.done.toLocaleString("en")} of ${run.total.toLocaleString("en")}`],
      ["training reward", change(run, "critic/score/mean")],
      ["loss", run.metrics["timing_s/gen"] ? "\u2013" : change(run, "actor/pg_loss")],
      ["validation reward", validation ? change(run, validation) : "\u2013"],
      ["response length", change(run, "response_length/mean")],
      ["seconds per step, recent median", isNumber(run.stepSeconds) ? seconds(run.stepSeconds) : "\u2013"],
      ["tokens per second and device, median", median(run, "perf/throughput")],
      ...(runs.some((other) => other.state === "running") ? [["time left", isNumber(run.secondsLeft) ? seconds(run.secondsLeft) : "\u2013"]] : []),
    ].filter(([, value]) => two || value !== "\u2013");
  }

  // -- curves --------------------------------------------------------------------------------------------------------
  function curves() {
    const groups = new Map();
    for (const panel of panels) { if (!groups.has(panel.group)) groups.set(panel.group, []); groups.get(panel.group).push(panel); }
    const folded = ["Validation in detail", "Other metrics"];
    for (const [name, members] of groups) if (!folded.includes(name)) section(name).append(grid(members));
    time();
    samples();
    for (const name of folded) {
      const members = groups.get(name) ?? [], fixed = name === "Other metrics" ? Object.entries(constants) : [];
      if (!members.length && !fixed.length) continue;
      const made = section(name);
      if (members.length) {
        const details = make("details"), count = members.length;
        details.append(make("summary", "", `${count} panel${count > 1 ? "s" : ""}`));
        details.addEventListener("toggle", () => { if (details.open && details.childNodes.length === 1) details.append(grid(members)); });
        made.append(details);
      }
      if (fixed.length) {
        const details = make("details");
        details.append(make("summary", "", `${fixed.length} metrics that have never changed`), scrolled(table(["metric", ...(two ? runs.map((run) => run.name) : ["value"])], fixed.map(([metric, values]) => [metric, ...values.map((value) => short(value))]))));
        made.append(details);
      }
    }
  }
  function grid(members) {
    const made = make("div", "grid");
    for (const panel of members) { const drawn = panelFigure(panel, runs); if (drawn) made.append(drawn); }
    return made;
  }

  // -- time ----------------------------------------------------------------------------------------------------------
  // Seconds per phase, stacked. What no phase covers is "other". Each phase is that of the slowest rank, so that their sum may
  // be more than the step. A phase has one colour, also in two runs. Two roles work at the same time: each has its own stack.
  const phaseColours = new Map(), ROLES = ["training", "rollout"];
  function phaseTable(run, role) {
    const mean = (values) => { const found = values.filter(isNumber); return found.length ? found.reduce((a, b) => a + b, 0) / found.length : 0; };
    const whole = run.metrics["timing_s/step"]?.y ?? [], places = run.steps.map((step, place) => place).filter((place) => isNumber(whole[place]));
    const phases = Object.entries(run.phases).filter(([, [of]]) => role === null || of === role).map(([name, [, text]]) => ({ name, text, y: run.metrics[`timing_s/${name}`].y }));
    const covered = (place) => phases.reduce((sum, phase) => sum + (phase.y[place] ?? 0), 0);
    const rest = (place) => (isNumber(whole[place]) && role !== "rollout" ? Math.max(0, whole[place] - covered(place)) : null); // of a rollout rank, which samples for another step, only the mean has one
    phases.push({ name: "other", text: "between the phases", y: run.steps.map((step, place) => rest(place)) });
    for (const phase of phases) phase.mean = mean(places.map((place) => phase.y[place] ?? 0));
    if (role === "rollout") phases[phases.length - 1].mean = Math.max(0, mean(places.map((place) => whole[place])) - phases.reduce((sum, phase) => sum + phase.mean, 0));
    phases.sort((a, b) => (a.name === "other") - (b.name === "other") || b.mean - a.mean);
    for (const phase of phases) {
      if (phase.name !== "other" && !phaseColours.has(phase.name)) phaseColours.set(phase.name, COLOURS[phaseColours.size % COLOURS.length]);
      phase.colour = phaseColours.get(phase.name) ?? "#c9cdd2"; // apart from the grey of COLOURS
    }
    const sum = phases.reduce((sum, phase) => sum + phase.mean, 0), highest = Math.max(0, ...places.map((place) => Math.max(whole[place], covered(place))));
    return { run, phases: phases.filter((phase) => phase.mean > 5e-4 * sum), places, sum, highest, whole: role === null ? sum : mean(places.map((place) => whole[place])),
      title: [two ? run.name : "", role === null ? "" : `${role} ranks`].filter(Boolean).join(", ") };
  }
  function phaseFigure({ run, phases, places, title }, highest) {
    const layers = phases.map((phase) => ({ ...phase, y: places.map((place) => phase.y[place] ?? 0) })), starts = places.map((place) => run.steps[place]);
    return stackFigure(title || "Phases of a step", "seconds per step", starts, run.width, layers, (place) => (place === null ? "mean" : `step ${stepText(run, starts[place])}`),
      (layer, place) => seconds(place === null ? layer.mean : layer.y[place]), highest);
  }
  function bar({ name, mean, colour }, whole) {
    const inner = make("div");
    inner.style.width = `${(100 * mean) / whole}%`; inner.style.background = colour; inner.title = `${name}: ${seconds(mean)}`;
    return inner;
  }
  function time() {
    const tables = runs.flatMap((run) => (run.hasRoles ? ROLES : [null]).map((role) => phaseTable(run, role))).filter(({ places }) => places.length);
    if (!tables.length) return;
    const note = "Seconds of the slowest rank. A phase that grows alone is the one to look at; the command train with --profile shows what a phase waits for.";
    const hasRoles = tables.some(({ run }) => run.hasRoles), highest = hasRoles ? Math.max(...tables.map((one) => one.highest)) : 0;
    const made = section("Where the time goes", hasRoles ? `${note} Two roles work at the same time, so shares are of the step's time. Rollout ranks sample for a later step: a single step of theirs may differ in length.` : note);
    if (hasRoles) {
      const longest = Math.max(...tables.map(({ sum }) => sum)), axis = make("div", "axis soft small");
      for (const { phases, title } of tables) { const row = make("div", "share role"); row.append(...phases.map((phase) => bar(phase, longest))); made.append(make("div", "small", title), row); }
      axis.append(make("span", "", "0 s"), make("span", "", `mean step, one time axis: ${seconds(longest)}`));
      made.append(axis);
    }
    const both = make("div", tables.length > 1 ? "grid" : "");
    both.append(...tables.map((one) => phaseFigure(one, highest)));
    made.append(both);
    for (const { phases, whole, title } of tables) {
      const rows = phases.map((phase) => {
        const share = make("div", "share"); share.append(bar(phase, whole));
        return [`${phase.name}: ${phase.text}`, seconds(phase.mean), `${((100 * phase.mean) / whole).toFixed(1)} %`, share];
      });
      if (title) made.append(make("h3", "", title));
      made.append(scrolled(table(["phase", "per step", "share", ""], rows)));
    }
  }

  // -- samples -------------------------------------------------------------------------------------------------------
  const COLOURINGS = [["gap", "policy against engine"], ["surprise", "probability"], ["none", "none"]];
  function samples() {
    const withSamples = runs.filter((run) => run.samples.length);
    if (!withSamples.length) return;
    const made = section("Samples", "Responses to one prompt beside each other, with their rewards and advantages.");
    const form = make("form", "choices"), shown = make("div"), pickers = {};
    const picked = () => withSamples[Number(pickers.run?.value ?? 0)];
    const add = (key, label, options, changed) => { const [box, select] = choice(label, options, changed); pickers[key] = select; form.append(box); };
    if (withSamples.length > 1) add("run", "Run", withSamples.map((run, number) => [number, run.name]), fill);
    add("step", "Step", [], fillGroups); add("group", "Prompt", [], show); add("colour", "Colour of the tokens", COLOURINGS, show);
    form.addEventListener("submit", (event) => event.preventDefault());
    made.append(form, shown);
    function fill() {
      pickers.step.replaceChildren(...picked().samples.map((kept, number) => option(number, kept.step.toLocaleString("en"))));
      pickers.step.value = String(picked().samples.length - 1);
      fillGroups();
    }
    function fillGroups() {
      const groups = picked().samples[Number(pickers.step.value)].groups;
      pickers.group.replaceChildren(...groups.map((group, number) => option(number, `${number + 1} of ${groups.length}: ${(group.uid || group.prompt).slice(0, 50)}`)));
      show();
    }
    function show() {
      const group = picked().samples[Number(pickers.step.value)].groups[Number(pickers.group.value)];
      if (group) shown.replaceChildren(...groupOf(group, pickers.colour.value)); else shown.replaceChildren(make("p", "soft", "no sample was kept of this step"));
    }
    fill();
  }
  function groupOf(group, colouring) {
    const gaps = group.samples.flatMap((sample) => sample.pieces.map((piece) => piece[2]).filter(isNumber)).map(Math.abs), largest = Math.max(...gaps);
    const prompt = make("details", "prompt"), cards = make("div", "cards"), readout = make("p", "soft small readout", "Point at a token to read its log-probabilities.");
    prompt.open = true;
    prompt.append(make("summary", "", `Prompt${group.source ? ` of ${group.source}` : ""}`), make("div", "text", group.prompt));
    if (group.images) prompt.append(pictures(group.images));
    if (group.answer) prompt.append(make("h3", "", "Reference answer"), make("div", "text", group.answer));
    const best = Math.max(...group.samples.map((sample) => sample.reward ?? -Infinity));
    const trajectories = [];
    for (const sample of group.samples) if (sample.row > 1 && trajectories.at(-1)?.[0].index === sample.index) trajectories.at(-1).push(sample); else trajectories.push([sample]);
    cards.append(...trajectories.map((rows) => card(rows, colouring, best)));
    const token = (event) => event.target.closest?.("[data-read]");
    for (const kind of ["pointerover", "click"]) cards.addEventListener(kind, (event) => { const found = token(event); if (found) readout.textContent = found.dataset.read; });
    const legend = make("p", "small key");
    if (colouring === "gap") {
      for (const [value, text] of [[-1, "policy lower by 1"], [-0.03, "by 0.03"], [0, "equal"], [0.03, "higher by 0.03"], [1, "by 1"]]) { const entry = make("span", "token", text); entry.style.background = gapColour(value); legend.append(entry, " "); }
      legend.append(make("span", "soft", gaps.length ? `nats. Largest difference here: ${short(largest)}.` : "No differences are known for this step."));
    } else if (colouring === "surprise") {
      for (const probability of [1, 0.5, 0.1, 0.01]) { const entry = make("span", "token", `p = ${probability}`); entry.style.background = surpriseColour(Math.log(probability)); legend.append(entry, " "); }
    }
    return [prompt, legend, cards, readout];
  }
  const mixed = (colour, strength) => `color-mix(in srgb, ${colour} ${Math.round(100 * Math.min(1, Math.max(0, strength)))}%, transparent)`;
  const gapColour = (gap) => (isNumber(gap) && gap ? mixed(gap > 0 ? "#3b78c2" : "#e08214", 0.75 * (Math.log10(Math.abs(gap)) + 3) / 3) : "none");
  const surpriseColour = (logprob) => (isNumber(logprob) ? mixed("#c2476b", (-logprob / 5) * 0.75) : "none");
  function tokenOf(sample, [piece, engine, gap], number, colouring) {
    const token = make("span", engine === null ? "token context" : "token", piece);
    if (engine !== null) {
      token.dataset.read = `\u201c${piece}\u201d: ${sample.drawn ? "engine" : "policy"} ${short(engine)} (p = ${short(Math.exp(engine))})` + (isNumber(gap) ? `, policy ${short(engine + gap)}, difference ${short(gap)}` : "");
      token.style.background = colouring === "gap" ? gapColour(gap) : colouring === "surprise" ? surpriseColour(engine) : "none";
    }
    return sample.cut && number + 1 === sample.cut_at ? [token, make("span", "soft", ` [${sample.cut.toLocaleString("en")} more tokens] `)] : [token];
  }
  function card(rows, colouring, best) { // `rows`: the token sequences of a trajectory, of which the last one has its end
    const made = make("article", "card"), head = make("div", "head"), sample = rows[rows.length - 1];
    const good = isNumber(sample.reward) && sample.reward === best && best > 0;
    head.append(make("span", `badge ${good ? "right" : "wrong"}`, `reward ${short(sample.reward)}`));
    if (isNumber(sample.score) && sample.score !== sample.reward) head.append(make("span", "small", `before penalties ${short(sample.score)}`));
    const trained = (row) => (row.advantage === null ? "not trained on" : `advantage ${short(row.advantage)}`), counted = (count) => `${count.toLocaleString("en")} token${count === 1 ? "" : "s"}`;
    if (!sample.rows) head.append(make("span", "small", trained(sample)));
    head.append(make("span", "small soft", counted(rows.reduce((sum, row) => sum + row.tokens, 0))));
    if (sample.finish_reason === "length") head.append(make("span", "badge mark", "cut off"));
    if (sample.status && sample.status !== "ok") head.append(make("span", "badge mark", sample.status));
    made.append(head);
    for (const row of rows) {
      if (row.rows) {
        const prompt = make("details", "prompt");
        prompt.append(make("summary", "", `Row ${row.row} of ${row.rows}: ${trained(row)}`), make("div", "text", row.prompt));
        made.append(prompt);
      }
      const tokens = row.pieces.map((piece, number) => tokenOf(row, piece, number, colouring)), box = (from, end) => { const text = make("div", "text"); text.append(...tokens.slice(from, end).flat()); return text; };
      (row.turns ?? []).forEach(({ kind, end, ...turn }, number) => {
        const use = turn.trained === 0 || row.advantage === null ? "read only" : turn.trained === turn.tokens ? "trained" : `${turn.trained.toLocaleString("en")} trained`;
        const role = [kind, counted(turn.tokens), use, ...(isNumber(turn.reward) ? [`reward ${short(turn.reward)}`] : []), `engine step ${turn.clock.toLocaleString("en")}`, ...(turn.seconds ? [seconds(turn.seconds)] : [])];
        made.append(turnBox(kind, role.join(", "), box(number ? row.turns[number - 1].end : 0, end)));
      });
      if (!row.turns?.length) made.append(box(0));
    }
    if (sample.failure) made.append(make("p", "small wrong", sample.failure));
    const metrics = Object.entries(sample.metrics ?? {});
    if (metrics.length) made.append(make("p", "soft small", metrics.map(([name, value]) => `${name} ${short(value)}`).join(", ")));
    return made;
  }

  // -- config and events ---------------------------------------------------------------------------------------------
  function config() {
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
    if (!keys.length) return;
    const made = section("Config"), form = make("form", "choices"), label = make("label", "choice", "Key or value"), filter = make("input"), rows = make("div");
    filter.type = "search"; filter.placeholder = "for example: lr"; label.append(filter); form.append(label);
    form.addEventListener("submit", (event) => event.preventDefault());
    let only = null;
    if (two) { const box = make("label", "check"); only = make("input"); only.type = "checkbox"; only.checked = true; only.addEventListener("change", show); box.append(only, " only what differs"); form.append(box); }
    const value = (run, key) => (run.settings[key] ?? "\u2013");
    function show() {
      const wanted = filter.value.trim().toLowerCase();
      const kept = keys.filter((key) => (!only?.checked || runs[0].settings[key] !== runs[1].settings[key]) && (!wanted || [key, ...runs.map((run) => value(run, key))].some((text) => text.toLowerCase().includes(wanted))));
      rows.replaceChildren(kept.length ? scrolled(table(["key", ...(two ? runs.map((run) => run.name) : ["value"])], kept.map((key) => [key, ...runs.map((run) => value(run, key))]))) : make("p", "soft", only?.checked && !wanted ? "The configs are equal." : "No key matches."));
    }
    filter.addEventListener("input", show);
    for (const run of runs) for (const attempt of run.attempts) {
      made.append(make("h3", "", `${two ? `${run.name}: ` : ""}attempt ${attempt.number}`));
      made.append(attempt.changes.length ? scrolled(table(["key", "first attempt", "this attempt"], attempt.changes.map((row) => row))) : make("p", "soft small", "the same config as the first attempt"));
    }
    const details = make("details"); details.open = two;
    details.append(make("summary", "", two ? "Both configs" : `All ${keys.length} keys${runs[0].attempts.length ? " of the first attempt" : ""}`), form, rows);
    made.append(details);
    show();
  }
  const KINDS = { started: "calm", resumed: "calm", guard: "mark", stopped: "mark", stalled: "wrong", failed: "wrong", done: "right", lost: "wrong", healed: "right", grown: "calm" };
  function healing() {
    if (!runs.some((run) => run.recoveries.length)) return;
    const made = section("Losses of ranks"), head = ["when", "steps done", "what", "layout", "until ended", "built", "synced", "together", "steps again", "tokens again"];
    for (const run of runs) {
      if (two) made.append(make("h3", "", run.name));
      const rows = run.recoveries.map((loss) => {
        const parts = loss.seconds.length ? [...loss.seconds, loss.seconds.reduce((sum, each) => sum + each, 0)].map(seconds) : ["another loss came before", "", "", ""];
        return [clock(loss.time), loss.steps_done.toLocaleString("en"), loss.who, loss.layout, ...parts, loss.steps_again.toLocaleString("en"), loss.tokens_again.toLocaleString("en")];
      });
      made.append(scrolled(table(head, rows)));
    }
  }
  function events() {
    if (!runs.some((run) => run.events.length)) return;
    const made = section("Events");
    for (const run of runs) {
      if (two) made.append(make("h3", "", run.name));
      if (run.numEvents > run.events.length) made.append(make("p", "soft small", `the last ${run.events.length} of ${run.numEvents}`));
      const list = make("ol", "events");
      for (const event of run.events) {
        const line = make("li"), head = make("div", "head");
        head.append(make("span", `badge ${KINDS[event.kind]}`, event.kind), make("span", "small", event.step === null ? "" : `step ${event.step.toLocaleString("en")}`), make("span", "small soft", clock(event.time)));
        line.append(head);
        if (event.text) line.append(make("div", "text small", event.text));
        list.append(line);
      }
      made.append(list);
    }
  }

  head();
  if (!runs.some((run) => run.steps.length)) main.append(make("p", "note", "No step is complete yet."));
  curves();
  config();
  healing();
  events();
  markWide();
})();
