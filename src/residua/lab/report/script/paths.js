// Paths to a token: what each source adds to one logit, through each read.

function paths(mount) {
  const routed = data.paths.map((each, place) => (each ? place : -1)).filter((place) => place >= 0);
  const state = { design: routed[0], target: 0, token: 0, site: null };
  const bar = el("div", { class: "bar" });
  const strip = el("div", { class: "tokens", role: "group", "aria-label": "Predicted after this token" });
  const caption = el("figcaption", {});
  const scale = el("div");
  const readout = el("p", { class: "readout", "aria-live": "polite", id: "path-readout" });
  const list = el("div", { id: "path-parts" });
  const own = () => data.paths[state.design];
  const target = () => own().targets[state.target];

  // 16-bit multiples of `step`, [cell][token]; unpacked once.
  function cellsOf(each, which) {
    const found = each.targets[which];
    if (!found.array) {
      const view = new DataView(Uint8Array.from(atob(found.packed), (letter) => letter.charCodeAt(0)).buffer);
      found.array = Array.from({ length: view.byteLength / 2 }, (_, place) => view.getInt16(2 * place, true) * found.step);
    }
    const count = found.tokens.length;
    return gridOf(each, Array.from({ length: found.array.length / count }, (_, cell) => found.array[cell * count + state.token]));
  }

  const map = heatMap(() => {
    const each = own();
    const cells = cellsOf(each, state.target);
    return { title: `Parts of the logit of ${target().tokens[state.token]}`, rows: each.sites, columns: each.sources, signed: true, largest: largestOf(cells),
      value: (row, column) => cells[row][column], picked: { row: each.sites.indexOf(state.site), column: -1 },
      text: (row, column, value) => `${each.sources[column]} through ${each.sites[row]}: ${known(value) ? signedText(value) : "cannot be read"}`,
      pick: (row) => change({ site: row < 0 ? null : each.sites[row] }) };
  });

  function change(changes) {
    Object.assign(state, changes);
    state.token = Math.min(state.token, target().tokens.length - 1);
    if (!own().sites.includes(state.site)) state.site = own().sites.includes("head") ? "head" : own().sites[own().sites.length - 1];
    show();
  }

  function showParts() {
    const each = own();
    const row = each.sites.indexOf(state.site);
    const cells = cellsOf(each, state.target)[row];
    const rows = cells.map((value, place) => [each.sources[place], value]).filter(([, value]) => known(value)).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
    const largest = Math.max(1e-12, ...rows.map(([, value]) => Math.abs(value)));
    const items = rows.map(([name, value]) => el("li", {}, el("span", { title: name }, name),
      draw("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true", class: "figure" },
        draw("rect", { class: `fill ${value < 0 ? "c-purple" : "c-orange"}`, width: (100 * Math.abs(value)) / largest, height: 10 })),
      el("span", {}, signedText(value))));
    list.replaceChildren(el("h3", {}, `Through ${state.site}, the largest first`), el("ul", { class: "bars" }, items));
  }

  function show() {
    const each = own();
    const { tokens, logits, rest } = target();
    caption.replaceChildren(el("strong", {}, label(state.design)), el("br"), `to the logit of ${tokens[state.token]} after this token; seed ${each.seed}`);
    scale.replaceChildren(ramp(largestOf(cellsOf(each, state.target)), true));
    const after = strip.children.length;
    const names = data.routing[state.design].tokens || tokens;
    const shown = names.slice(0, tokens.length);
    if (strip.of !== state.design || after !== shown.length) {
      strip.of = state.design;
      strip.replaceChildren(...shown.map((text, place) => el("button", { type: "button", title: `token ${place + 1}`, onclick: () => change({ token: place }) }, text)));
    }
    [...strip.children].forEach((button, place) => button.setAttribute("aria-pressed", String(place === state.token)));
    const logit = numberText(logits[state.token]);
    const left = numberText(rest[state.token]);
    readout.textContent = each.exact && each.sites.includes("head")
      ? `The logit of ${tokens[state.token]} is ${logit}: the head's row, and ${left} that no source brings.`
      : `The logit of ${tokens[state.token]} is ${logit}; these are slopes and do not add up to it.`;
    map.draw();
    showParts();
  }

  bar.append(
    select("path-design", "Design", routed.map((place) => [place, data.series[place].label]), state.design, (value) => change({ design: Number(value) })),
    select("path-target", "Target", target().title ? own().targets.map((each, place) => [place, each.title]) : [], state.target, (value) => change({ target: Number(value) })));
  mount.replaceChildren(bar, el("p", { class: "small" }, "After this token:"), strip, el("figure", { "data-map": "paths" }, caption, map.node, scale), readout, list);
  change({ token: target().tokens.length - 1 });
}
