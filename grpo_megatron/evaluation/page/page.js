// The list of problems: filters, search, pages. All text enters the page as text nodes or through mathematics.render.
"use strict";
(() => {
  const PER_PAGE = 20, CHECK = "\u2713", CROSS = "\u2717";
  const tasks = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const make = (name, className, text) => { const made = document.createElement(name); if (className) made.className = className; if (text !== undefined) made.textContent = text; return made; };
  const VERDICTS = { all: "all problems", texts: "those with texts on this page", "greedy-right": "greedy answer right", "greedy-wrong": "greedy answer wrong", mixed: "drawn answers mixed",
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
    const usable = Object.entries(VERDICTS).filter(([key]) => (key.startsWith("greedy") ? task.greedy : key === "mixed" ? task.drawn > 1 : true));
    $("verdict").replaceChildren(...usable.map(([key, text]) => option(key, text)));
    $("first-prompt").querySelector("pre").textContent = task.prompt;
    filter();
  }
  // a row: [number, subject, level, greedy right (0, 1 or null), right of drawn, flags, text or null]
  const MATCHES = {
    all: () => true, texts: (row) => row[6] !== null, "greedy-right": (row) => row[3] === 1, "greedy-wrong": (row) => row[3] === 0,
    mixed: (row, task) => row[4] > 0 && row[4] < task.drawn, never: (row) => !row[3] && !row[4], always: (row, task) => row[3] !== 0 && row[4] === task.drawn,
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
    const text = row[6];
    return text !== null && [text.q, text.g, ...text.s.map((sample) => `${sample.t} ${sample.e ?? ""}`)].some((part) => part.toLowerCase().includes(wanted));
  }
  function show() {
    const task = tasks[$("task").value], pages = Math.max(1, Math.ceil(shown.length / PER_PAGE));
    $("list").replaceChildren(...shown.slice(page * PER_PAGE, (page + 1) * PER_PAGE).map((row) => problem(task, row)));
    const texts = task.rows.filter((row) => row[6] !== null).length;
    $("count").textContent = `${shown.length.toLocaleString("en")} of ${task.rows.length.toLocaleString("en")} problems` +
      (texts < task.rows.length ? `; this page holds the texts of ${texts.toLocaleString("en")} of them, samples/${$("task").value}.jsonl holds all. Search looks at these.` : "");
    $("page").textContent = `page ${page + 1} of ${pages}`;
    $("previous").disabled = page === 0;
    $("next").disabled = page + 1 >= pages;
  }
  function problem(task, row) {
    const [number, subject, level, greedy, right, flags, text] = row;
    const made = make("details", "problem"), head = make("summary");
    head.append(make("span", "uid", `${$("task").value}/${number}`));
    if (greedy !== null) head.append(make("span", `badge ${greedy ? "right" : "wrong"}`, greedy ? `${CHECK} greedy` : `${CROSS} greedy`));
    if (task.drawn) head.append(make("span", `badge ${right === task.drawn ? "right" : right ? "mixed" : "wrong"}`, `${right} of ${task.drawn}`));
    if (flags & 1) head.append(make("span", "badge mark", "format"));
    if (flags & 2) head.append(make("span", "badge mark", "truncated"));
    if (flags & 4) head.append(make("span", "badge mark", "grader failed"));
    if (subject !== null) head.append(make("span", "soft small", task.subjects[subject]));
    if (level !== null) head.append(make("span", "soft small", task.levels[level]));
    head.append(make("span", "teaser", text ? text.q.slice(0, 160) : "(texts in samples/)"));
    made.append(head);
    made.addEventListener("toggle", () => { if (made.open && made.childNodes.length === 1) made.append(inside(task, text, number)); });
    return made;
  }
  function inside(task, text, number) {
    const made = make("div", "inside");
    if (text === null) { made.append(make("p", "note", `The texts of this problem are on line ${number + 1} of samples/${$("task").value}.jsonl.`)); return made; }
    made.append(make("h3", "", "Question"), mathematics.render(make("div", "text"), text.q, task.dollars));
    made.append(make("h3", "", "Gold answer"), mathematics.render(make("div", "text"), task.dollars ? `$${text.g}$` : text.g, task.dollars));
    made.append(make("h3", "", text.s.length < text.n ? `Answers (${text.s.length} of ${text.n})` : "Answers"));
    for (const sample of text.s) made.append(answer(task, sample));
    return made;
  }
  function answer(task, sample) {
    const made = make("div", sample.c ? "sample right" : "sample"), head = make("div", "head");
    head.append(make("b", "", sample.c ? `${CHECK} right` : `${CROSS} wrong`), make("span", "", sample.i < 0 ? "greedy" : `sample ${sample.i}`));
    const extracted = make("span");
    extracted.append("answer: ");
    if (sample.e === null) extracted.append(make("i", "", "none found")); else extracted.append(task.dollars ? mathematics.render(make("span", "text"), `$${sample.e}$`, true) : make("code", "", sample.e));
    head.append(extracted, make("span", "soft", `${sample.k.toLocaleString("en")} tokens`));
    for (const [bit, name] of [[1, "format error"], [2, "truncated"], [4, "grader failed"]]) if (sample.f & bit) head.append(make("span", "badge mark", name));
    made.append(head, mathematics.render(make("div", "text"), sample.t, task.dollars));
    if (sample.x) made.append(make("p", "note small", `${sample.x.toLocaleString("en")} more characters in samples/.`));
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
  const wanted = location.hash.match(/^#open=(\d+)$/); // opens the first so many: to print, or to test
  if (wanted) [...document.querySelectorAll(".problem")].slice(0, Number(wanted[1])).forEach((made) => { made.open = true; });
})();
