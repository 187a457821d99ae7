// Smooths the charts and shows values under the pointer. Without it the page has the curves as they are.
const charts = [...document.querySelectorAll("svg[data-box]")].map((svg) => {
  const [left, top, right, bottom] = svg.dataset.box.split(" ").map(Number);
  const [first, last, low, high] = svg.dataset.range.split(" ").map(Number);
  const scale = "log" in svg.dataset ? Math.log10 : (value) => value;
  const lines = [...svg.querySelectorAll("polyline[data-values]")].map((raw) => {
    const smooth = raw.cloneNode(true);
    raw.after(smooth);
    const values = raw.dataset.values.split(" ").map((pair) => pair.split(",").map(Number));
    return { raw, smooth, values, shown: values };
  });
  const rule = document.createElementNS("http://www.w3.org/2000/svg", "line");
  rule.setAttribute("class", "rule");
  svg.append(rule);
  return {
    svg, lines, rule, left, top, right, bottom,
    x: (step) => left + ((step - first) / (last - first)) * (right - left),
    y: (value) => bottom - ((scale(value) - low) / (high - low)) * (bottom - top),
    step: (x) => first + ((x - left) / (right - left)) * (last - first),
  };
});

// An exponential moving average without the bias of its start.
function average(values, weight) {
  let sum = 0, share = 0;
  return values.map(([step, value]) => {
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return [step, sum / share];
  });
}

const controls = document.querySelector(".controls");
const slider = controls?.querySelector("input[type=range]");

function draw() {
  const weight = Number(slider.value);
  controls.querySelector("output").textContent = weight.toFixed(2);
  for (const { lines, x, y } of charts) {
    for (const line of lines) {
      const smoothed = weight > 0 && !line.raw.hasAttribute("stroke-dasharray"); // an evaluation is a mean already
      line.shown = smoothed ? average(line.values, weight) : line.values;
      line.smooth.setAttribute("points", line.shown.map(([s, v]) => `${x(s).toFixed(1)},${y(v).toFixed(1)}`).join(" "));
      line.raw.classList.toggle("faint", smoothed);
    }
  }
  remember("smoothing", slider.value);
}

// What was chosen stays when the page of a run in progress loads again. A file may have no storage.
function remember(name, value) {
  try { sessionStorage.setItem(name, value); } catch {}
}
function remembered(name) {
  try { return sessionStorage.getItem(name); } catch { return null; }
}

if (slider) {
  controls.hidden = false;
  slider.value = remembered("smoothing") ?? 0;
  slider.addEventListener("input", draw);
  for (const box of controls.querySelectorAll("input[type=checkbox]")) {
    const toggle = () => {
      document.querySelectorAll(`.run.c${box.value}`).forEach((line) => line.classList.toggle("off", !box.checked));
      remember(`run ${box.value}`, box.checked ? "" : "off");
    };
    box.checked = remembered(`run ${box.value}`) !== "off";
    box.addEventListener("change", toggle);
    toggle();
  }
  draw();
}

const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);

function brief(value) {
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}

for (const { svg, lines, rule, top, bottom, x, step } of charts) {
  const hide = () => { tip.hidden = true; rule.style.display = "none"; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const at = step(new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x);
    const near = lines.filter(({ raw }) => !raw.classList.contains("off")).map(({ raw, values, shown }) => {
      const away = values.map(([where]) => Math.abs(where - at));
      const index = away.indexOf(Math.min(...away));
      return { raw, where: values[index][0], value: values[index][1], shown: shown[index][1], away: away[index] };
    });
    if (!near.length) return hide();
    const closest = near.reduce((a, b) => (b.away < a.away ? b : a)).where;
    tip.replaceChildren(`${svg.dataset.across} ${closest.toLocaleString("en")}`);
    for (const { raw, where, value, shown } of near) {
      const row = document.createElement("div");
      const key = document.createElement("i");
      key.className = `key ${[...raw.classList].find((name) => /^c\d$/.test(name))}`;
      const other = where === closest ? "" : ` at ${where.toLocaleString("en")}`;
      const text = shown === value ? brief(value) : `${brief(shown)} (${brief(value)})`;
      row.append(key, `${raw.dataset.label}: ${text}${other}`);
      tip.append(row);
    }
    for (const [name, value] of [["x1", x(closest)], ["x2", x(closest)], ["y1", top], ["y2", bottom]])
      rule.setAttribute(name, value);
    rule.style.display = "inline";
    tip.hidden = false;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, room))}px`;
    tip.style.top = `${event.clientY + 18}px`;
  });
}
