// What all pages are made of. All texts enter as text nodes. Curves and stacks are SVG, drawn at the width that they have on the screen, so that their text keeps its size on a phone.
// The legend under a figure shows the values at the pointer, or else the last ones; a click on a name hides its curve.
"use strict";
const SVG = "http://www.w3.org/2000/svg";
// The first eight differ for deuteranopes and protanopes too (CIE Lab distance of 20 at least), on both grounds.
const COLOURS = ["#3b78c2", "#e08214", "#2e9e68", "#7132da", "#7a4f01", "#56b4e9", "#f08cae", "#17607a", "#8c8f94", "#b9a900"];
const make = (name, className, text) => { const made = document.createElement(name); if (className) made.className = className; if (text !== undefined) made.textContent = text; return made; };
const draw = (name, attributes, text) => { const made = document.createElementNS(SVG, name); for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value); if (text !== undefined) made.textContent = text; return made; };
const isNumber = (value) => typeof value === "number";

const option = (value, text) => { const made = make("option", "", text); made.value = value; return made; };
const choice = (label, options, changed) => { const made = make("label", "choice", label), select = make("select"); select.append(...options.map(([value, text]) => option(value, text))); select.addEventListener("change", changed); made.append(select); return [made, select]; };
const pictures = (uris) => { const made = make("div", "pictures"); made.append(...uris.filter((uri) => uri.startsWith("data:image/")).map((uri, number) => { const image = make("img"); image.src = uri; image.alt = `image ${number + 1}`; return image; })); return made; };
function turnBox(kind, role, ...content) { // one turn of a dialogue
  const made = make("div", `turn ${kind}`);
  made.append(make("div", "role", role), ...content);
  return made;
}
const scrolled = (inner) => { const made = make("div", "scroll"); made.append(inner); return made; };
function table(head, rows) {
  const made = make("table"), top = make("tr");
  top.append(...head.map((cell) => make("th", "", cell)));
  made.append(top, ...rows.map((row) => { const line = make("tr"); line.append(...row.map((cell) => { if (cell instanceof Node) { const made = make("td"); made.append(cell); return made; } return make("td", "", cell); })); return line; }));
  return made;
}

function short(value, digits = 4) {
  if (!isNumber(value)) return "\u2013";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}
function seconds(value) {
  if (!isNumber(value)) return "\u2013";
  if (value > 0 && value < 0.0005) return "< 1 ms";
  if (value < 0.0995) return `${Math.round(1000 * value)} ms`;
  if (value < 10) return `${value.toPrecision(2)} s`;
  if (value < 90) return `${Math.round(value)} s`;
  const minutes = Math.round(value / 60);
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
function niceTicks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough)), size = [1, 2, 5, 10].find((n) => n * power >= rough) * power, ticks = [];
  for (let n = Math.ceil(low / size - 1e-9); n * size <= high + size * 1e-9; n += 1) ticks.push(Number((n * size).toPrecision(12)));
  return ticks;
}
function logTicks(low, high) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9), every = Math.max(1, Math.ceil((last - first) / 4)), ticks = [];
  for (let n = first; n <= last; n += every) ticks.push(10 ** n);
  return ticks.length > 1 ? ticks : [low, high].map((value) => Number(value.toPrecision(2)));
}
function median(values, place) { // over a tenth of the run, centred: it does not lag, and a single spike does not move it
  const half = Math.floor(values.length / 20), near = values.slice(Math.max(0, place - half), place + half + 1).filter(isNumber).sort((a, b) => a - b);
  return near.length && isNumber(values[place]) ? near[Math.floor(near.length / 2)] : null;
}

// A figure that is drawn again when its width changes. `lines(place)`: [name, colour, text] of the legend.
function figure(title, unit, text, paint, options = {}) {
  const made = make("figure"), caption = make("figcaption"), box = make("div", "plot"), legend = make("div", "legend"), at = make("span", "at");
  caption.append(make("b", "", title), make("span", "soft", unit));
  made.append(caption, box, legend);
  if (text) made.append(make("p", "soft small", text));
  const state = { hidden: new Set(), log: Boolean(options.log), place: null };
  if (options.canLog) {
    const button = make("button", "log", "log"); button.type = "button";
    const show = () => { button.setAttribute("aria-pressed", state.log); };
    button.title = "logarithmic scale"; show();
    button.addEventListener("click", () => { state.log = !state.log; show(); redraw(); });
    caption.append(button);
  }
  let view = null, width = 0;
  function redraw() {
    if (!width) return;
    view = paint(width, state);
    view.svg.setAttribute("role", "img"); view.svg.setAttribute("aria-label", `${title}, ${unit}`);
    box.replaceChildren(view.svg);
    legends();
  }
  function legends() {
    const place = state.place ?? view.last;
    at.textContent = view.where(place);
    legend.replaceChildren(at, ...view.lines(place).map(([key, name, colour, value, dashed]) => {
      const entry = make("button", state.hidden.has(key) ? "entry off" : "entry"); entry.type = "button";
      const mark = make("span", dashed ? "swatch dashed" : "swatch"); mark.style.setProperty("--colour", colour);
      entry.append(mark, `${name} `, make("b", "", value));
      entry.addEventListener("click", () => { if (!state.hidden.delete(key)) state.hidden.add(key); redraw(); });
      return entry;
    }));
    view.mark(state.place);
  }
  function point(event) { state.place = view.nearest(event.clientX - box.getBoundingClientRect().left); legends(); }
  box.addEventListener("pointermove", point);
  box.addEventListener("pointerdown", point);
  box.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") { state.place = null; legends(); } });
  new ResizeObserver(() => { if (box.clientWidth !== width) { width = box.clientWidth; redraw(); } }).observe(box);
  return made;
}

// The plane of a figure: scales, grid, and the pointer's line. `steps`: the places on the x axis.
function plane(width, height, steps, low, high, log, integer = true) {
  const left = 46, right = 8, top = 8, bottom = 22, svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  const first = steps[0] ?? 0, span = Math.max(1, (steps[steps.length - 1] ?? 1) - first), scale = log ? Math.log10 : (value) => value;
  const x = (step) => left + ((step - first) / span) * (width - left - right);
  const y = (value) => top + (1 - (scale(value) - scale(low)) / (scale(high) - scale(low) || 1)) * (height - top - bottom);
  for (const tick of log ? logTicks(low, high) : niceTicks(low, high, 4)) {
    svg.append(draw("path", { class: "grid", d: `M${left} ${y(tick).toFixed(1)}H${width - right}` }), draw("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, short(tick)));
  }
  const ticks = niceTicks(first, first + span, Math.max(2, Math.floor(width / 90))).filter((tick) => !integer || Number.isInteger(tick));
  for (const tick of ticks) {
    const end = x(tick) > width - right - 14;
    svg.append(draw("text", { x: end ? width - right : x(tick), y: height - 6, "text-anchor": end ? "end" : "middle" }, tick.toLocaleString("en")));
  }
  const pointer = draw("path", { class: "pointer", d: "" });
  return { svg, x, y, left, right, top, bottom, width, height, pointer, finish() { svg.append(pointer); } };
}
function nearestOf(steps, x) {
  return (position) => { let best = 0; steps.forEach((step, place) => { if (Math.abs(x(step) - position) < Math.abs(x(steps[best]) - position)) best = place; }); return best; };
}
const pathOf = (points) => { let path = "", open = false; for (const [x, y] of points) { if (y === null) { open = false; continue; } path += `${open ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`; open = true; } return path; };

// One panel: the curves of one or two runs. Curves with gaps, such as validation, are joined over the gaps.
function panelFigure(panel, runs) {
  const several = runs.length > 1, all = [];
  panel.curves.forEach(([metric, label], number) => runs.forEach((run, which) => {
    const data = run.metrics[metric];
    if (!data || !data.y.some(isNumber) && !data.lost) return;
    const single = panel.curves.length === 1;
    all.push({ key: `${which}/${metric}`, name: several ? (single ? run.name : `${label}, ${run.name}`) : label, run, data, metric,
      colour: COLOURS[(single ? which : number) % COLOURS.length], dashed: which === 1 && !single });
  }));
  if (!all.length) return null;
  const steps = [...new Set(runs.flatMap((run) => run.steps))].sort((a, b) => a - b);
  for (const curve of all) curve.at = new Map(curve.run.steps.map((step, place) => [step, place]));
  const values = (curve) => [curve.data.y, curve.data.low ?? [], curve.data.high ?? []].flat().filter(isNumber);
  const canLog = all.some((curve) => values(curve).some((value) => value > 0)) && !all.some((curve) => values(curve).some((value) => value < 0));
  function paint(width, state) {
    const shown = all.filter((curve) => !state.hidden.has(curve.key)), log = state.log && canLog;
    let numbers = shown.flatMap(values).filter((value) => !log || value > 0);
    if (!numbers.length) numbers = [0, 1];
    let low = Math.min(...numbers), high = Math.max(...numbers);
    const near = panel.references.filter(([value]) => (log ? value > low / 10 && value < high * 10 : value >= low - (high - low) && value <= high + (high - low)));
    for (const [value] of near) { low = Math.min(low, value); high = Math.max(high, value); }
    if (low === high) { low = log ? low / 2 : low - (Math.abs(low) || 1) * 0.5; high = log ? high * 2 : high + (Math.abs(high) || 1) * 0.5; }
    else if (!log) { const space = (high - low) * 0.05; low = low >= 0 && low < space ? 0 : low - space; high += space; }
    const flat = plane(width, 190, steps, log ? low / 1.2 : low, log ? high * 1.2 : high, log), { svg, x, y } = flat;
    for (const run of runs) for (const event of run.events) {
      if (event.step === null || ["started", "done"].includes(event.kind) || event.step < steps[0] || event.step > steps[steps.length - 1]) continue;
      const line = draw("path", { class: `event ${event.kind}`, d: `M${x(event.step).toFixed(1)} ${flat.top}V${flat.height - flat.bottom}` });
      line.append(draw("title", {}, `${event.kind} at step ${event.step}`)); svg.append(line);
    }
    for (const [value, name] of near) svg.append(draw("path", { class: "reference", d: `M${flat.left} ${y(value).toFixed(1)}H${width - flat.right}` }), draw("text", { x: width - flat.right, y: y(value) - 4, "text-anchor": "end", class: "reference" }, `${name} ${short(value)}`));
    for (const curve of shown) {
      const seen = curve.data.y.map((value, place) => [place, value]).filter(([, value]) => isNumber(value) && (!log || value > 0)), at = ([place, value]) => [x(curve.run.steps[place]), y(value)];
      if (curve.data.low) {
        const bound = (which) => seen.map(([place, value]) => { const found = curve.data[which][place] ?? value; return at([place, log && found <= 0 ? value : found]); });
        svg.append(draw("path", { class: "band", fill: curve.colour, d: `${pathOf(bound("high"))}${pathOf(bound("low").reverse()).replace("M", "L")}Z` }));
      }
      const style = { stroke: curve.colour, ...(curve.dashed ? { "stroke-dasharray": "5 3" } : {}) };
      if (seen.length >= 40) {
        const raw = seen.map(([, value]) => value), smooth = seen.map(([place], number) => [place, median(raw, number)]);
        svg.append(draw("path", { class: "curve faint", ...style, d: pathOf(seen.map(at)) }), draw("path", { class: "curve", ...style, d: pathOf(smooth.map(at)) }));
      } else {
        svg.append(draw("path", { class: "curve", ...style, d: pathOf(seen.map(at)) }));
        for (const place of seen) { const [px, py] = at(place); svg.append(draw("circle", { cx: px.toFixed(1), cy: py.toFixed(1), r: 2, fill: curve.colour })); }
      }
      for (const place of curve.data.lost ?? []) { const mark = draw("path", { class: "lost", d: `M${x(curve.run.steps[place]).toFixed(1)} ${flat.top}V${flat.height - flat.bottom}` }); mark.append(draw("title", {}, "not finite")); svg.append(mark); }
    }
    const dots = shown.map((curve) => draw("circle", { r: 3.5, fill: curve.colour, class: "dot", visibility: "hidden" }));
    flat.finish(); svg.append(...dots);
    const valueAt = (curve, place) => { const own = curve.at.get(steps[place]); return own === undefined ? undefined : curve.data.y[own]; };
    const lastOf = (curve) => curve.data.y.findLast(isNumber);
    const lostAt = (curve, place) => curve.data.lost?.includes(curve.at.get(steps[place]));
    return {
      svg, last: null, nearest: nearestOf(steps, x),
      where: (place) => (place === null ? "last" : `step ${stepText(runs[0], steps[place])}`),
      lines: (place) => all.map((curve) => [curve.key, curve.name, curve.colour, place === null ? short(lastOf(curve)) : lostAt(curve, place) ? "not finite" : short(valueAt(curve, place)), curve.dashed]),
      mark: (place) => {
        flat.pointer.setAttribute("d", place === null ? "" : `M${x(steps[place]).toFixed(1)} ${flat.top}V${flat.height - flat.bottom}`);
        shown.forEach((curve, number) => {
          const value = place === null ? undefined : valueAt(curve, place), visible = isNumber(value) && (!log || value > 0);
          dots[number].setAttribute("visibility", visible ? "visible" : "hidden");
          if (visible) { dots[number].setAttribute("cx", x(steps[place])); dots[number].setAttribute("cy", y(value)); }
        });
      },
    };
  }
  return figure(panel.title, panel.unit, panel.text, paint, { log: panel.log, canLog });
}
const stepText = (run, step) => (run.width > 1 ? `${step.toLocaleString("en")} to ${(step + run.width - 1).toLocaleString("en")}` : step.toLocaleString("en"));

// Layers stacked over intervals of an axis: `starts` of the intervals, their `size`, and of each layer `y`, one number per
// interval; the axis reaches `highest`. `where(place)` and `value(layer, place)` are texts of the legend; the place is null where there is no pointer.
function stackFigure(title, unit, starts, size, layers, where, value, highest = 0) {
  function paint(width, state) {
    const shown = layers.filter((layer) => !state.hidden.has(layer.name)), totals = starts.map((_, place) => shown.reduce((sum, layer) => sum + layer.y[place], 0));
    const flat = plane(width, 230, [...starts, starts[starts.length - 1] + size], 0, Math.max(...totals, highest, 1e-9) * 1.04, false), { svg, x, y } = flat;
    let below = starts.map(() => 0);
    for (const layer of shown) {
      const above = below.map((value, place) => value + layer.y[place]), top = [], low = [];
      starts.forEach((start, place) => {
        for (const end of [x(start), x(starts[place + 1] ?? start + size)]) { top.push([end, y(above[place])]); low.push([end, y(below[place])]); }
      });
      svg.append(draw("path", { style: `fill: ${layer.colour}`, d: `${pathOf(top)}${pathOf(low.reverse()).replace("M", "L")}Z` }));
      below = above;
    }
    flat.finish();
    return {
      svg, last: null, where,
      nearest: (position) => { let best = 0; starts.forEach((start, place) => { if (x(start) <= position) best = place; }); return best; },
      lines: (place) => layers.map((layer) => [layer.name, layer.name, layer.colour, value(layer, place)]),
      mark: (place) => flat.pointer.setAttribute("d", place === null ? "" : `M${x(starts[place] + size / 2).toFixed(1)} ${flat.top}V${flat.height - flat.bottom}`),
    };
  }
  return figure(title, unit, "", paint);
}

function markWide() { // says so where a table can be scrolled sideways: phones show no scrollbar
  for (const box of document.querySelectorAll(".scroll")) {
    const hint = box.nextElementSibling?.classList.contains("scroll-hint") ? box.nextElementSibling : null, isWide = box.scrollWidth > box.clientWidth + 1;
    if (isWide && !hint) { box.after(make("p", "scroll-hint", "\u2194 the table is wider: scroll it sideways")); box.tabIndex = 0; }
    if (!isWide) hint?.remove();
  }
}
window.addEventListener("resize", markWide);
