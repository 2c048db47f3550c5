// The figures of the tasks, and the list of problems: filters, search, pages.
(() => {
  const PER_PAGE = 20, CHECK = "\u2713", CROSS = "\u2717";
  const $ = (id) => document.getElementById(id);
  const tasks = JSON.parse($("data").textContent);
  const VERDICTS = { all: "all problems", texts: "those with texts on this page", "greedy-right": "greedy answer right", "greedy-wrong": "greedy answer wrong", mixed: "sampled answers mixed",
    never: "never right", always: "always right", format: "a format error", truncated: "a truncated answer", failed: "a grader failure" };
  let page = 0, shown = [];

  function fillLabels(id, values) {
    $(`${id}-label`).hidden = values.length < 2;
    $(id).replaceChildren(option("", "all"), ...values.map((value) => option(value, value)));
  }
  function chooseTask() {
    const task = tasks[$("task").value];
    fillLabels("subject", task.subjects);
    fillLabels("level", task.levels);
    const usable = Object.entries(VERDICTS).filter(([key]) => (task.isMean ? ["all", "texts", "truncated", "failed"].includes(key) : key.startsWith("greedy") ? task.greedy : key === "mixed" ? task.samples > 1 : true));
    $("verdict").replaceChildren(...usable.map(([key, text]) => option(key, text)));
    $("first-prompt").querySelector("pre").textContent = task.prompt;
    filter();
  }
  // a row: [number, subject, level, greedy right (0, 1 or null), number of right samples, flags, texts or null, mean reward (of a task with rewards besides 0 and 1)]
  const MATCHES = {
    all: () => true, texts: (row) => row[6] !== null, "greedy-right": (row) => row[3] === 1, "greedy-wrong": (row) => row[3] === 0,
    mixed: (row, task) => row[4] > 0 && row[4] < task.samples, never: (row) => !row[3] && !row[4], always: (row, task) => row[3] !== 0 && row[4] === task.samples,
    format: (row) => row[5] & 1, truncated: (row) => row[5] & 2, failed: (row) => row[5] & 4,
  };
  function filter() {
    const task = tasks[$("task").value], matches = MATCHES[$("verdict").value], wanted = $("search").value.trim().toLowerCase();
    const subject = $("subject").value, level = $("level").value;
    shown = task.rows.filter((row) => matches(row, task) && (!subject || task.subjects[row[1]] === subject) && (!level || task.levels[row[2]] === level) && (!wanted || contains(task, row, wanted)));
    page = 0;
    show();
  }
  function contains(task, row, wanted) {
    if (`${$("task").value}/${row[0]}` === wanted) return true;
    const texts = row[6];
    return texts !== null && [texts.question, texts.answer, ...texts.samples.flatMap((sample) => [...(sample.turns ? sample.turns.map((turn) => turn[1]) : [sample.text]), sample.prediction ?? ""])].some((text) => text.toLowerCase().includes(wanted));
  }
  function show() {
    const task = tasks[$("task").value], pages = Math.max(1, Math.ceil(shown.length / PER_PAGE));
    $("list").replaceChildren(...shown.slice(page * PER_PAGE, (page + 1) * PER_PAGE).map((row) => problem(task, row)));
    const texts = task.rows.filter((row) => row[6] !== null).length;
    $("count").textContent = `${shown.length.toLocaleString("en")} of ${task.rows.length.toLocaleString("en")} problems` +
      (texts < task.rows.length ? `; this page holds the texts of ${texts.toLocaleString("en")} of them, which can be searched; samples/${$("task").value}.jsonl holds all.` : "");
    $("page").textContent = `page ${page + 1} of ${pages}`;
    $("previous").disabled = page === 0;
    $("next").disabled = page + 1 >= pages;
  }
  function problem(task, row) {
    const [number, subject, level, greedy, right, flags, texts, reward] = row;
    const made = make("details", "problem"), head = make("summary");
    head.append(make("span", "uid", `${$("task").value}/${number}`));
    if (task.isMean) head.append(make("span", "badge calm", `reward ${reward}`));
    if (!task.isMean && greedy !== null) head.append(make("span", `badge ${greedy ? "right" : "wrong"}`, greedy ? `${CHECK} greedy` : `${CROSS} greedy`));
    if (!task.isMean && task.samples) head.append(make("span", `badge ${right === task.samples ? "right" : right ? "mixed" : "wrong"}`, `${right} of ${task.samples}`));
    if (flags & 1) head.append(make("span", "badge mark", "format"));
    if (flags & 2) head.append(make("span", "badge mark", "truncated"));
    if (flags & 4) head.append(make("span", "badge mark", "grader failed"));
    if (subject !== null) head.append(make("span", "soft small", task.subjects[subject]));
    if (level !== null) head.append(make("span", "soft small", task.levels[level]));
    head.append(make("span", "teaser", texts ? texts.question.slice(0, 160) : "(texts in samples/)"));
    made.append(head);
    made.addEventListener("toggle", () => { if (made.open && made.childNodes.length === 1) made.append(inside(task, texts, number)); });
    return made;
  }
  function inside(task, texts, number) {
    const made = make("div", "inside");
    if (texts === null) { made.append(make("p", "note", `The texts of this problem are on line ${number + 1} of samples/${$("task").value}.jsonl.`)); return made; }
    made.append(make("h3", "", "Question"), make("div", "text", texts.question), pictures(texts.images.map((place) => task.pictures[place])));
    made.append(make("h3", "", "Reference answer"), make("div", "text", texts.answer));
    made.append(make("h3", "", texts.samples.length < texts.numSamples ? `Completions (${texts.samples.length} of ${texts.numSamples})` : "Completions"));
    for (const sample of texts.samples) made.append(completion(sample));
    return made;
  }
  function completion(sample) {
    const made = make("div", sample.right ? "sample right" : "sample"), head = make("div", "head");
    const verdict = sample.right ? `${CHECK} right` : `${CROSS} wrong`;
    head.append(make("b", "", sample.reward === null ? verdict : `reward ${short(sample.reward)}`), make("span", "", sample.index < 0 ? "greedy" : `sample ${sample.index}`));
    const prediction = make("span", "text", "prediction: ");
    prediction.append(sample.prediction ?? make("i", "", "none found"));
    if (sample.reward === null) head.append(prediction);
    head.append(make("span", "soft", `${sample.tokens.toLocaleString("en")} tokens`));
    for (const [bit, name] of [[1, "format error"], [2, "truncated"], [4, "grader failed"]]) if (sample.flags & bit) head.append(make("span", "badge mark", name));
    if (sample.status !== "ok") head.append(make("span", "badge mark", sample.status));
    made.append(head);
    if (!sample.turns) made.append(make("div", "text", sample.text));
    for (const [kind, text] of sample.turns ?? []) made.append(turnBox(kind, kind, make("div", "text", text)));
    if (sample.cut) made.append(make("p", "note small", `${sample.cut.toLocaleString("en")} more characters in samples/.`));
    return made;
  }

  $("task").replaceChildren(...Object.keys(tasks).map((name) => option(name, name)));
  $("task").addEventListener("change", chooseTask);
  for (const id of ["verdict", "subject", "level"]) $(id).addEventListener("change", filter);
  let timer = 0;
  $("search").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(filter, 150); });
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("previous").addEventListener("click", () => { page -= 1; show(); });
  $("next").addEventListener("click", () => { page += 1; show(); });
  // right and wrong per bin of tokens; problems per number of right answers, of which 0 is drawn as wrong
  document.querySelectorAll(".charts").forEach((charts, number) => {
    const { histogram, counts, isMean } = Object.values(tasks)[number], colours = { right: "var(--right)", wrong: "var(--wrong)" };
    const layer = (name, y) => ({ name: isMean ? { right: "reward 1", wrong: "other rewards" }[name] : name, y, colour: colours[name] }), total = (made) => made.y.reduce((sum, value) => sum + value, 0);
    const value = (made, place) => (place === null ? total(made) : made.y[place]).toLocaleString("en");
    const starts = histogram.right.map((_, place) => place * histogram.size);
    charts.append(stackFigure("Tokens per completion", "completions", starts, histogram.size, [layer("right", histogram.right), layer("wrong", histogram.wrong)],
      (place) => (place === null ? "all" : histogram.size > 1 ? `${starts[place]} to ${starts[place] + histogram.size - 1}` : `${starts[place]}`), value));
    if (counts && !isMean) charts.append(stackFigure("Right answers of a problem", "problems", counts.map((_, right) => right), 1, [layer("right", counts.map((count, right) => (right ? count : 0))), layer("wrong", counts.map((count, right) => (right ? 0 : count)))],
      (place) => (place === null ? "all" : `${place} of ${counts.length - 1}`), value));
  });
  chooseTask();
  markWide();
  const wanted = location.hash.match(/^#open=(\d+)$/); // #open=3 opens the first 3 problems: to print, or to test
  if (wanted) [...document.querySelectorAll(".problem")].slice(0, Number(wanted[1])).forEach((made) => { made.open = true; });
})();
