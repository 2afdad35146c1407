"use strict";
(() => {
  const root = document.documentElement;
  root.classList.remove("no-script");
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  // Ink and grid follow the page, so that light and dark both have their contrast.
  const dress = (layout) => {
    const ink = colour("--ink"), grid = colour("--grid");
    layout.font.color = ink;
    for (const axis of [layout.xaxis, layout.yaxis]) Object.assign(axis, { gridcolor: grid, linecolor: ink });
    for (const shape of layout.shapes || []) shape.line.color = ink;
    return layout;
  };
  const timelines = {};
  const draw = (node) => {
    const spec = JSON.parse(document.getElementById("spec-" + node.id).textContent);
    const layout = dress(spec.layout);
    const zoomable = layout.dragmode === "zoom";
    if (coarse) layout.dragmode = false;
    if (window.innerWidth < 500) layout.font.size = 11;
    for (const trace of spec.data) if (trace.type === "contour") trace.line.color = colour("--ink");
    if (zoomable) timelines[node.id] = { view: layout.xaxis.range.slice(), span: span(spec.data) };
    return Plotly.newPlot(node, spec.data, layout, { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset" });
  };
  const span = (data) => {
    let end = 0;
    for (const trace of data) trace.base.forEach((start, i) => { end = Math.max(end, start + trace.x[i]); });
    return [0, end];
  };
  const moves = {
    in: ([a, b]) => [a + (b - a) / 4, b - (b - a) / 4],
    out: ([a, b]) => [a - (b - a) / 2, b + (b - a) / 2],
    earlier: ([a, b]) => [a - (b - a) / 2, b - (b - a) / 2],
    later: ([a, b]) => [a + (b - a) / 2, b + (b - a) / 2],
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-move]");
    if (!button) return;
    const node = document.getElementById(button.dataset.chart), known = timelines[button.dataset.chart], move = button.dataset.move;
    const now = node.layout.xaxis.range;
    const range = move === "steady" ? known.view.slice() : move === "all" ? known.span.slice() : moves[move](now);
    Plotly.relayout(node, { "xaxis.range": range });
  });
  const nodes = [...document.querySelectorAll(".plot")];
  Promise.all(nodes.map(draw)).then(() => { root.dataset.drawn = String(nodes.length); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { nodes.forEach(draw); });
})();
