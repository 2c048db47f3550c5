// The list of problems: filters, search, pages. Texts enter the page as text nodes; formulas are copies of the MathML
// elements in the template "formulas", which evaluation/formulas.py has written.
"use strict";
(() => {
  const PER_PAGE = 20, CHECK = "\u2713", CROSS = "\u2717";
  const $ = (id) => document.getElementById(id);
  const tasks = JSON.parse($("data").textContent), formulas = $("formulas").content.children;
  const make = (name, className, text) => { const made = document.createElement(name); if (className) made.className = className; if (text !== undefined) made.textContent = text; return made; };
  const VERDICTS = { all: "all problems", texts: "those with texts on this page", "greedy-right": "greedy answer right", "greedy-wrong": "greedy answer wrong", mixed: "sampled answers mixed",
    never: "never right", always: "always right", format: "a format error", truncated: "a truncated answer", failed: "a grader failure" };
  let page = 0, shown = [];

  function option(value, text) { const made = make("option", "", text); made.value = value; return made; }
  function fillLabels(id, values) {
    $(`${id}-label`).hidden = values.length < 2;
    $(id).replaceChildren(option("", "all"), ...values.map((value) => option(value, value)));
  }
  function chooseTask() {
    const task = tasks[$("task").value];
    fillLabels("subject", task.subjects);
    fillLabels("level", task.levels);
    const usable = Object.entries(VERDICTS).filter(([key]) => (key.startsWith("greedy") ? task.greedy : key === "mixed" ? task.samples > 1 : true));
    $("verdict").replaceChildren(...usable.map(([key, text]) => option(key, text)));
    $("first-prompt").querySelector("pre").textContent = task.prompt;
    filter();
  }
  // a row: [number, subject, level, greedy right (0, 1 or null), number of right samples, flags, texts or null]
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
    return texts !== null && [texts.question, texts.answer, ...texts.samples.flatMap((sample) => [...(sample.turns ? sample.turns.map((turn) => turn[1]) : [sample.text]), sample.prediction ?? []])].some((text) => plain(text).toLowerCase().includes(wanted));
  }
  // a text is a list of pieces: a string, [TeX, number of its MathML or null], or {drawing}
  const plain = (text) => text.map((piece) => (typeof piece === "string" ? piece : Array.isArray(piece) ? piece[0] : piece.drawing)).join("");
  function render(target, text) {
    for (const piece of text) {
      if (typeof piece === "string") target.append(piece);
      else if (!Array.isArray(piece)) target.append(make("span", "drawing", piece.drawing));
      else target.append(piece[1] === null ? make("code", "tex", piece[0]) : document.importNode(formulas[piece[1]], true));
    }
    return target;
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
    const [number, subject, level, greedy, right, flags, texts] = row;
    const made = make("details", "problem"), head = make("summary");
    head.append(make("span", "uid", `${$("task").value}/${number}`));
    if (greedy !== null) head.append(make("span", `badge ${greedy ? "right" : "wrong"}`, greedy ? `${CHECK} greedy` : `${CROSS} greedy`));
    if (task.samples) head.append(make("span", `badge ${right === task.samples ? "right" : right ? "mixed" : "wrong"}`, `${right} of ${task.samples}`));
    if (flags & 1) head.append(make("span", "badge mark", "format"));
    if (flags & 2) head.append(make("span", "badge mark", "truncated"));
    if (flags & 4) head.append(make("span", "badge mark", "grader failed"));
    if (subject !== null) head.append(make("span", "soft small", task.subjects[subject]));
    if (level !== null) head.append(make("span", "soft small", task.levels[level]));
    head.append(make("span", "teaser", texts ? plain(texts.question).slice(0, 160) : "(texts in samples/)"));
    made.append(head);
    made.addEventListener("toggle", () => { if (made.open && made.childNodes.length === 1) made.append(inside(texts, number)); });
    return made;
  }
  function inside(texts, number) {
    const made = make("div", "inside");
    if (texts === null) { made.append(make("p", "note", `The texts of this problem are on line ${number + 1} of samples/${$("task").value}.jsonl.`)); return made; }
    made.append(make("h3", "", "Question"), render(make("div", "text"), texts.question));
    made.append(make("h3", "", "Reference answer"), render(make("div", "text"), texts.answer));
    made.append(make("h3", "", texts.samples.length < texts.numSamples ? `Completions (${texts.samples.length} of ${texts.numSamples})` : "Completions"));
    for (const sample of texts.samples) made.append(completion(sample));
    return made;
  }
  function completion(sample) {
    const made = make("div", sample.right ? "sample right" : "sample"), head = make("div", "head");
    head.append(make("b", "", sample.right ? `${CHECK} right` : `${CROSS} wrong`), make("span", "", sample.index < 0 ? "greedy" : `sample ${sample.index}`));
    const prediction = make("span", "text");
    prediction.append("prediction: ");
    if (sample.prediction === null) prediction.append(make("i", "", "none found")); else render(prediction, sample.prediction);
    head.append(prediction, make("span", "soft", `${sample.tokens.toLocaleString("en")} tokens`));
    for (const [bit, name] of [[1, "format error"], [2, "truncated"], [4, "grader failed"]]) if (sample.flags & bit) head.append(make("span", "badge mark", name));
    if (sample.status !== "ok") head.append(make("span", "badge mark", sample.status));
    made.append(head);
    if (!sample.turns) made.append(render(make("div", "text"), sample.text));
    for (const [kind, text] of sample.turns ?? []) {
      const turn = make("div", `turn ${kind}`);
      turn.append(make("div", "role", kind), render(make("div", "text"), text));
      made.append(turn);
    }
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
  chooseTask();
  function markWide() { // says so where a table can be scrolled sideways: phones show no scrollbar
    for (const box of document.querySelectorAll(".scroll")) {
      const hint = box.nextElementSibling?.classList.contains("scroll-hint") ? box.nextElementSibling : null, isWide = box.scrollWidth > box.clientWidth + 1;
      if (isWide && !hint) { box.after(make("p", "scroll-hint", "\u2194 the table is wider: scroll it sideways")); box.tabIndex = 0; }
      if (!isWide) hint?.remove();
    }
  }
  markWide();
  window.addEventListener("resize", markWide);
  const wanted = location.hash.match(/^#open=(\d+)$/); // #open=3 opens the first 3 problems: to print, or to test
  if (wanted) [...document.querySelectorAll(".problem")].slice(0, Number(wanted[1])).forEach((made) => { made.open = true; });
})();
