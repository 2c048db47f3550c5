// LaTeX in text -> MathML elements, made node by node: nothing of the text is ever parsed as HTML.
// A formula that is too long, too deep or malformed is shown as it was written.
"use strict";
const mathematics = (() => {
  const NS = "http://www.w3.org/1998/Math/MathML", LONGEST = 4000, DEEPEST = 40;
  const words = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => { const [k, v] = pair.split("="); return [k, String.fromCodePoint(parseInt(v, 16))]; }));
  const LETTERS = words(`alpha=3b1 beta=3b2 gamma=3b3 delta=3b4 epsilon=3f5 varepsilon=3b5 zeta=3b6 eta=3b7 theta=3b8 vartheta=3d1 iota=3b9 kappa=3ba lambda=3bb mu=3bc nu=3bd
    xi=3be pi=3c0 varpi=3d6 rho=3c1 varrho=3f1 sigma=3c3 varsigma=3c2 tau=3c4 upsilon=3c5 phi=3d5 varphi=3c6 chi=3c7 psi=3c8 omega=3c9 Gamma=393 Delta=394 Theta=398 Lambda=39b Xi=39e
    Pi=3a0 Sigma=3a3 Upsilon=3a5 Phi=3a6 Psi=3a8 Omega=3a9 ell=2113 hbar=210f infty=221e emptyset=2205 varnothing=2205 aleph=2135 Re=211c Im=2111 imath=131 jmath=237 degree=b0 partial=2202 nabla=2207`);
  const OPERATORS = words(`cdot=22c5 times=d7 div=f7 pm=b1 mp=2213 le=2264 leq=2264 leqslant=2a7d ge=2265 geq=2265 geqslant=2a7e ne=2260 neq=2260 lt=3c gt=3e ll=226a gg=226b approx=2248 equiv=2261 cong=2245 sim=223c
    simeq=2243 propto=221d in=2208 notin=2209 ni=220b subset=2282 subseteq=2286 supset=2283 supseteq=2287 cup=222a cap=2229 setminus=2216 backslash=5c to=2192 rightarrow=2192 longrightarrow=27f6 Rightarrow=21d2
    implies=27f9 iff=27fa Leftrightarrow=21d4 leftrightarrow=2194 leftarrow=2190 Leftarrow=21d0 mapsto=21a6 uparrow=2191 downarrow=2193 ldots=2026 dots=2026 dotsc=2026 dotsb=22ef cdots=22ef vdots=22ee ddots=22f1 angle=2220
    measuredangle=2221 triangle=25b3 square=25a1 perp=22a5 parallel=2225 circ=2218 forall=2200 exists=2203 neg=ac lnot=ac land=2227 wedge=2227 lor=2228 vee=2228 oplus=2295 otimes=2297 prime=2032 mid=2223 nmid=2224
    star=22c6 ast=2217 bullet=2219 therefore=2234 because=2235 colon=3a quad=2003 langle=27e8 rangle=27e9 lfloor=230a rfloor=230b lceil=2308 rceil=2309 lvert=7c rvert=7c vert=7c lVert=2016 rVert=2016 Vert=2016 lbrace=7b
    rbrace=7d lbrack=5b rbrack=5d`);
  const BIG = words("sum=2211 prod=220f int=222b iint=222c iiint=222d oint=222e bigcup=22c3 bigcap=22c2 coprod=2210");
  const ACCENTS = words("bar=af overline=af hat=5e widehat=5e vec=2192 overrightarrow=2192 tilde=7e widetilde=7e dot=2d9 ddot=a8 overleftrightarrow=2194 overarc=2312");
  const NAMES = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp det dim ker deg arg gcd lcm max min sup inf lim Pr hom".split(" "));
  const LIMITS = new Set("lim max min sup inf gcd Pr".split(" "));
  const SPACES = { ",": ".17em", ":": ".22em", ";": ".28em", " ": ".3em", "!": "0em", quad: "1em", qquad: "2em", enspace: ".5em", thinspace: ".17em" };
  const IGNORED = new Set("displaystyle textstyle scriptstyle limits nolimits nonumber notag hline normalsize small large Large centering noindent it rm bf".split(" "));
  const ONE_ARGUMENT = new Set("hspace vspace label color".split(" "));
  const TEXTS = new Set("text textrm textbf textit textsf texttt mbox hbox operatorname mathrm textnormal emph".split(" "));
  const STYLES = new Set("mathbb mathbf mathcal mathit mathsf mathfrak boldsymbol mathscr bm".split(" "));
  const DOUBLE = { C: "\u2102", H: "\u210d", N: "\u2115", P: "\u2119", Q: "\u211a", R: "\u211d", Z: "\u2124" };
  const FENCES = { matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["\u2016", "\u2016"], cases: ["{", ""], smallmatrix: ["", ""] };

  function element(name, children, attributes) {
    const made = document.createElementNS(NS, name);
    for (const child of [].concat(children ?? [])) made.append(child);
    for (const [key, value] of Object.entries(attributes ?? {})) made.setAttribute(key, value);
    return made;
  }
  const row = (children) => (children.length === 1 ? children[0] : element("mrow", children));

  function parse(source) {
    const tokens = source.match(/\\[A-Za-z]+|\\[^A-Za-z]|\d+(?:[.,]\d+)*|\s+|[^]/gu) ?? [];
    let place = 0, depth = 0;
    const peek = () => tokens[place];
    const skipSpace = () => { while (place < tokens.length && /^\s/.test(tokens[place])) place += 1; };
    const deeper = (work) => { if (++depth > DEEPEST) throw new Error("too deep"); const made = work(); depth -= 1; return made; };

    function rawGroup() { // {text}, as it is
      skipSpace();
      if (peek() !== "{") return tokens[place++] ?? "";
      let open = 0, text = "";
      do { const token = tokens[place++]; if (token === undefined) throw new Error("unclosed"); if (token === "{") open += 1; if (token === "}") open -= 1; text += token; } while (open);
      return text.slice(1, -1);
    }
    function optional() { skipSpace(); if (peek() !== "[") return null; place += 1; const inner = list((token) => token === "]"); place += 1; return row(inner); }
    function argument() {
      skipSpace();
      if (peek() !== "{") { if (place >= tokens.length) throw new Error("missing argument"); const digits = /^\d{2,}/.test(peek()); if (digits) { const all = tokens[place]; tokens[place] = all.slice(1); return element("mn", all[0]); } return deeper(atom); }
      place += 1;
      const inner = deeper(() => list((token) => token === "}"));
      place += 1;
      return row(inner);
    }
    function list(ends) {
      const made = [];
      for (;;) {
        skipSpace();
        if (place >= tokens.length) { if (ends) throw new Error("unclosed"); return made; }
        if (ends?.(peek())) return made;
        const next = scripted();
        if (next) made.push(next);
      }
    }
    function scripted() {
      let base = peek() === "^" || peek() === "_" ? element("mrow") : deeper(atom), under = null, over = null;
      if (!base) return null;
      for (;;) {
        skipSpace();
        if (peek() === "'") { let marks = ""; while (peek() === "'") { marks += "\u2032"; place += 1; } over = over ? element("mrow", [over, element("mo", marks)]) : element("mo", marks); }
        else if (peek() === "^" && !over) { place += 1; over = argument(); }
        else if (peek() === "_" && !under) { place += 1; under = argument(); }
        else break;
      }
      const kind = base.dataset?.limits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
      if (under && over) return element(kind[2], [base, under, over]);
      return under ? element(kind[0], [base, under]) : over ? element(kind[1], [base, over]) : base;
    }
    function fence() { skipSpace(); const token = tokens[place++] ?? "."; if (token === ".") return ""; if (token[0] === "\\") { const name = token.slice(1); return OPERATORS[name] ?? ({ "{": "{", "}": "}", "|": "\u2016" }[name] ?? name); } return token === "<" ? "\u27e8" : token === ">" ? "\u27e9" : token; }
    const bracket = (text) => element("mo", text, { stretchy: "true", fence: "true" });

    function table(name) {
      if (name === "array" || name === "tabular") rawGroup();
      const end = (token) => token === "&" || token === "\\\\" || token === "\\end", rows = [[]];
      for (;;) {
        rows.at(-1).push(element("mtd", list(end)));
        const token = tokens[place++];
        if (token === "\\\\") { rows.push([]); skipSpace(); if (peek() === "[") optional(); } else if (token === "\\end") { rawGroup(); break; }
      }
      const aligned = /align|split|eqnarray|gather/.test(name);
      const body = element("mtable", rows.filter((cells) => cells.some((cell) => cell.childNodes.length)).map((cells) => element("mtr", cells)), { class: aligned ? "aligned" : name, displaystyle: aligned ? "true" : "false" });
      if (aligned) body.querySelectorAll("mtr").forEach((line) => line.querySelectorAll(":scope > mtd").forEach((cell, n) => cell.setAttribute("style", `text-align:${n % 2 ? "left" : "right"};padding:.2em .1em`)));
      if (name === "cases") body.querySelectorAll("mtd").forEach((cell) => cell.setAttribute("style", "text-align:left"));
      const [open, close] = FENCES[name.replace("*", "")] ?? ["", ""];
      return element("mrow", [...(open ? [bracket(open)] : []), body, ...(close ? [bracket(close)] : [])]);
    }

    function command(name) {
      if (name in LETTERS) return element("mi", LETTERS[name]);
      if (name in SPACES) return element("mspace", null, { width: SPACES[name] });
      if (name in BIG) { const made = element("mo", BIG[name], { movablelimits: "true" }); if (!/int/.test(name)) made.dataset.limits = "1"; return made; }
      if (NAMES.has(name)) { const made = element(LIMITS.has(name) ? "mo" : "mi", name); if (LIMITS.has(name)) { made.dataset.limits = "1"; made.setAttribute("movablelimits", "true"); } return made; }
      if (name in OPERATORS) return element("mo", OPERATORS[name], { stretchy: "false" });
      if (/^[dtc]?frac$/.test(name)) { const top = argument(), bottom = argument(), made = element("mfrac", [top, bottom]); return name === "dfrac" ? element("mstyle", made, { displaystyle: "true" }) : made; }
      if (/^[dt]?binom$/.test(name)) return element("mrow", [bracket("("), element("mfrac", [argument(), argument()], { linethickness: "0" }), bracket(")")]);
      if (name === "sqrt") { const index = optional(), inner = argument(); return index ? element("mroot", [inner, index]) : element("msqrt", inner); }
      if (name in ACCENTS) return element("mover", [argument(), element("mo", ACCENTS[name], { stretchy: String(/over|wide/.test(name)) })], { accent: "true" });
      if (name === "underline") return element("munder", [argument(), element("mo", "_", { stretchy: "true" })]);
      if (name === "overbrace" || name === "underbrace") { const over = name[0] === "o", made = element(over ? "mover" : "munder", [argument(), element("mo", over ? "\u23de" : "\u23df", { stretchy: "true" })]); made.dataset.limits = "1"; return made; }
      if (name === "stackrel" || name === "overset") { const over = argument(); return element("mover", [argument(), over]); }
      if (name === "underset") { const under = argument(); return element("munder", [argument(), under]); }
      if (TEXTS.has(name)) return element("mtext", rawGroup().replace(/\\([%$#&_{}])/g, "$1").replace(/^ | $/g, "\u00a0"));
      if (STYLES.has(name)) {
        const made = argument();
        if (name === "mathbb") for (const leaf of made.localName === "mi" ? [made] : made.querySelectorAll("mi")) leaf.textContent = DOUBLE[leaf.textContent] ?? leaf.textContent;
        return name === "mathbf" || name === "boldsymbol" || name === "bm" ? element("mstyle", made, { style: "font-weight:bold" }) : made;
      }
      if (name === "boxed" || name === "fbox") return element("mrow", argument(), { class: "boxed" });
      if (name === "textcolor") { rawGroup(); return argument(); }
      if (name === "phantom" || name === "hphantom" || name === "vphantom") return element("mphantom", argument());
      if (name === "pmod" || name === "pod") return element("mrow", [element("mspace", null, { width: ".4em" }), element("mo", "("), element("mi", "mod"), element("mspace", null, { width: ".3em" }), argument(), element("mo", ")")]);
      if (name === "bmod" || name === "mod") return element("mo", "mod", { lspace: ".3em", rspace: ".3em" });
      if (name === "tag") return element("mtext", `\u2003(${rawGroup()})`);
      if (name === "not") { const made = deeper(atom); made.append("\u0338"); return made; }
      if (name === "left") { const open = fence(), inner = list((token) => token === "\\right"); place += 1; const close = fence(); return element("mrow", [...(open ? [bracket(open)] : []), ...inner, ...(close ? [bracket(close)] : [])]); }
      if (/^(big|Big|bigg|Bigg)[lrm]?$/.test(name) || name === "middle") return bracket(fence());
      if (name === "begin") return deeper(() => table(rawGroup()));
      if (IGNORED.has(name)) return null;
      if (ONE_ARGUMENT.has(name)) { rawGroup(); return null; }
      if (name === "right" || name === "end") throw new Error("unmatched");
      return element("mtext", `\\${name}`, { class: "unknown" });
    }

    function isPrefix() { // a sign, not an operation: nothing to its left to add to
      let before = place - 2;
      while (before >= 0 && /^\s/.test(tokens[before])) before -= 1;
      const left = tokens[before];
      return left === undefined || /^[([{=<>,;|&^_+\-*/]$/.test(left) || ["\\\\", "\\{"].includes(left) || (/^\\/.test(left) && !(left.slice(1) in LETTERS) && !["\\}", "\\rangle"].includes(left));
    }
    function atom() {
      const token = tokens[place++];
      if (token === undefined) throw new Error("missing");
      if (token === "{") { const inner = list((next) => next === "}"); place += 1; return element("mrow", inner); }
      if (token === "}") throw new Error("unmatched");
      if (token === "&" || token === "\\\\") return null;
      if (token === "~") return element("mspace", null, { width: ".3em" });
      if (token[0] === "\\") { const name = token.slice(1); if (/^[A-Za-z]/.test(name) || name in SPACES) return command(name); return element("mo", name === "|" ? "\u2016" : name, { stretchy: "false" }); }
      if (/^\d/.test(token)) return element("mn", token);
      if (/^[\p{L}]/u.test(token)) return element("mi", token);
      if (token === "-" || token === "+") return element("mo", token === "-" ? "\u2212" : "+", { form: isPrefix() ? "prefix" : "infix" });
      return element("mo", token === "*" ? "\u2217" : token, { stretchy: "false" });
    }
    return list(null);
  }

  function formula(source, block) {
    if (source.length > LONGEST) return plain(source);
    try { return element("math", element("mrow", parse(source)), { display: block ? "block" : "inline" }); } catch { return plain(source); }
  }
  function plain(source) { const made = document.createElement("code"); made.className = "tex"; made.textContent = source; return made; }

  function braced(text, start) { // the end of {...} that opens at start
    let open = 0;
    for (let i = start; i < text.length && i < start + LONGEST; i += 1) { if (text[i] === "\\") i += 1; else if (text[i] === "{") open += 1; else if (text[i] === "}" && !--open) return i + 1; }
    return -1;
  }

  // `dollars`: whether $ encloses formulas; in word problems it is money
  function render(target, text, dollars) {
    const start = dollars
      ? /\$\$|\\\[|\\\(|(?<!\\)\$|\\boxed\s*\{|\\begin\{(align|equation|gather|cases|array|[pbv]?matrix)\*?\}|\[asy\]/g
      : /\\\[|\\\(|\\boxed\s*\{|\[asy\]/g;
    let done = 0, found;
    while ((found = start.exec(text)) !== null) {
      const open = found[0], from = found.index, inner = from + open.length;
      let end = -1, source = "", block = false, after = -1;
      if (open === "[asy]") { end = text.indexOf("[/asy]", inner); if (end < 0) continue; target.append(text.slice(done, from)); const drawing = document.createElement("span"); drawing.className = "drawing"; drawing.textContent = text.slice(inner, end).trim(); target.append(drawing); done = start.lastIndex = end + 6; continue; }
      if (open.startsWith("\\boxed")) { after = braced(text, inner - 1); source = text.slice(from, after); }
      else if (open.startsWith("\\begin")) { const close = `\\end${open.slice(6)}`; end = text.indexOf(close, inner); after = end < 0 ? -1 : end + close.length; source = text.slice(from, after); block = true; }
      else { const close = { "$$": "$$", "\\[": "\\]", "\\(": "\\)", "$": "$" }[open]; end = text.indexOf(close, inner); while (close === "$" && end > 0 && text[end - 1] === "\\") end = text.indexOf("$", end + 1); after = end < 0 ? -1 : end + close.length; source = text.slice(inner, end); block = open === "$$" || open === "\\["; if (close === "$" && /\n\s*\n/.test(source)) after = -1; }
      if (after < 0 || !source.trim()) continue;
      target.append(text.slice(done, from), formula(source, block));
      done = start.lastIndex = after;
    }
    target.append(text.slice(done));
    return target;
  }
  return { render };
})();
