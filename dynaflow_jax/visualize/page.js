"use strict";
(() => {
  const { timelines, bounds, tones } = JSON.parse(document.getElementById("data").textContent);
  const $ = (selector) => document.querySelector(selector);
  const AXIS = 24, CAPTION = 22, ROW = 32, SUBROW = 22, GAP = 8, BAR = 12, NARROW = 600;
  const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", "DejaVu Sans", sans-serif';
  const still = 4; // pixels that a pointer may move before a tap becomes a drag

  // -- text ---------------------------------------------------------------------------------------------------------

  const number = (value, digits) => String(Number(value.toPrecision(digits)));
  const si = (value, unit) => {
    for (const [factor, prefix] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (value >= factor) return `${number(value / factor, 3)} ${prefix}${unit}`;
    return `${number(value, 3)} ${unit}`;
  };
  const unitOf = (us) => (us >= 1e6 ? [1e6, "s"] : us >= 1e3 ? [1e3, "ms"] : us >= 1 || us === 0 ? [1, "µs"] : [1e-3, "ns"]);
  const time = (us, digits = 4) => {
    const [factor, unit] = unitOf(us);
    return `${number(us / factor, digits)} ${unit}`;
  };
  const about = (line, i) => {
    const took = line.end[i] - line.start[i];
    const rows = [["Stream", line.streams[line.stream[i]]]];
    if (line.batch[i] !== null) rows.push(["Micro-batch", String(line.batch[i])]);
    rows.push(["Time", `${time(took)}, from ${time(line.start[i])} to ${time(line.end[i])}`]);
    rows.push(["Bound", bounds[line.bound[i]]]);
    const rate = (amount, unit) => (took > 0 && amount > 0 ? ` (${si((amount / took) * 1e6, unit)})` : "");
    rows.push(["Work", si(line.flops[i], "FLOP") + rate(line.flops[i], "FLOP/s")]);
    rows.push([bounds[line.bound[i]] === "network" ? "Sent" : "Memory", si(line.bytes[i], "B") + rate(line.bytes[i], "B/s")]);
    if (line.shapes[line.shape[i]]) rows.push(["Results", line.shapes[line.shape[i]]]);
    return rows;
  };

  // -- colours ------------------------------------------------------------------------------------------------------

  let colours, fills;
  const ratio = () => Math.max(1, window.devicePixelRatio || 1);
  /** Compute is plain, memory is hatched, network is dotted. */
  const pattern = (context, bound) => {
    if (bound === "compute") return null;
    const scale = ratio(), tile = document.createElement("canvas"), size = 8;
    tile.width = tile.height = Math.round(size * scale);
    const pen = tile.getContext("2d");
    pen.scale(tile.width / size, tile.height / size);
    pen.strokeStyle = pen.fillStyle = colours[`${bound}-edge`];
    pen.globalAlpha = bound === "memory" ? 0.3 : 0.45;
    pen.beginPath();
    if (bound === "memory") {
      for (const at of [-size, 0, size]) { pen.moveTo(at - 1, size + 1); pen.lineTo(at + size + 1, -1); }
      pen.stroke();
    } else {
      for (const [x, y] of [[2, 2], [6, 6]]) { pen.moveTo(x, y); pen.arc(x, y, 1, 0, 7); }
      pen.fill();
    }
    const made = context.createPattern(tile, "repeat");
    made.setTransform(new DOMMatrix().scale(size / tile.width, size / tile.height));
    return made;
  };
  const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    colours = {};
    for (const name of ["paper", "ink", "soft", "line", "lane", "focus", ...bounds, ...bounds.map((b) => `${b}-edge`)])
      colours[name] = style.getPropertyValue(`--${name}`).trim();
    const context = document.createElement("canvas").getContext("2d");
    fills = bounds.map((bound) => ({ fill: colours[bound], edge: colours[`${bound}-edge`], pattern: pattern(context, bound) }));
  };
  /** The band of a micro-batch, in tones from that of text to that of paper. */
  const band = (pen, batch, x, y, width) => {
    pen.fillStyle = colours.paper;
    pen.fillRect(x, y, width, 5);
    pen.globalAlpha = 1 - (batch % tones) / (tones - 1);
    pen.fillStyle = colours.ink;
    pen.fillRect(x, y, width, 5);
    pen.globalAlpha = 1;
  };
  const legend = () => {
    for (const canvas of document.querySelectorAll(".legend canvas")) {
      const scale = ratio(), pen = canvas.getContext("2d");
      canvas.width = 26 * scale; canvas.height = 16 * scale;
      pen.scale(scale, scale);
      const { bound, tone } = canvas.dataset;
      const style = bound === undefined ? { fill: colours.lane, edge: colours.soft } : fills[bounds.indexOf(bound)];
      pen.fillStyle = style.fill; pen.fillRect(0, 0, 26, 16);
      if (style.pattern) { pen.fillStyle = style.pattern; pen.fillRect(0, 0, 26, 16); }
      if (tone !== undefined) band(pen, Number(tone), 1, 1, 24);
      pen.strokeStyle = style.edge; pen.strokeRect(0.5, 0.5, 25, 15);
    }
  };

  // -- the part of the time that is shown, the same for all timelines -------------------------------------------------

  const total = Math.max(...timelines.map((line) => line.total), 0) || 1;
  const least = Math.min(total, Math.max(total / 1e6, 0.001));
  const view = { from: 0, to: total };
  let queued = false;
  const redraw = () => {
    if (queued) return;
    queued = true;
    requestAnimationFrame(() => { queued = false; charts.forEach((chart) => chart.draw()); });
  };
  const show = (from, to) => {
    const span = Math.min(total, Math.max(least, to - from));
    view.from = Math.min(Math.max(0, from), total - span);
    view.to = view.from + span;
    $("#out").disabled = $("#fit").disabled = span >= total;
    $("#in").disabled = span <= least;
    redraw();
  };
  const zoom = (factor, at = (view.from + view.to) / 2) =>
    show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  const pan = (by) => show(view.from + by, view.to + by);

  // -- one timeline -------------------------------------------------------------------------------------------------

  let wanted = ""; // what is searched for
  class Chart {
    constructor(line, section) {
      this.line = line;
      this.box = section.querySelector(".chart");
      this.section = section;
      this.canvas = this.box?.querySelector("canvas");
      this.hovered = this.chosen = -1;
      this.lanes = line.streams.map(() => []);
      line.start.forEach((_, i) => ((this.lanes[line.stream[i]][line.row[i]] ??= []).push(i)));
      this.search();
      if (this.box) this.listen();
    }
    search() {
      const hits = wanted ? this.line.names.map((name) => name.toLowerCase().includes(wanted)) : null;
      this.dim = hits ? this.line.name.map((name) => !hits[name]) : null;
    }
    x(us) { return ((us - view.from) / (view.to - view.from)) * this.width; }
    us(x) { return view.from + (x / this.width) * (view.to - view.from); }

    draw(width = this.box?.clientWidth) {
      if (!this.box || this.section.hidden || !width) return;
      const scale = ratio(), pen = this.canvas.getContext("2d");
      this.width = width;
      let y = AXIS;
      this.places = this.lanes.map((rows) => {
        const row = rows.length > 1 ? SUBROW : ROW, tall = Math.max(rows.length, 1) * row, top = y + CAPTION;
        const place = { caption: y, top, tall, row, rows };
        y = top + tall + GAP;
        return place;
      });
      this.height = y + BAR;
      const size = [Math.round(width * scale), Math.round(this.height * scale)];
      if (this.canvas.width !== size[0]) this.canvas.width = size[0];
      if (this.canvas.height !== size[1]) this.canvas.height = size[1];
      this.canvas.style.height = `${this.height}px`;
      pen.setTransform(scale, 0, 0, scale, 0, 0);
      pen.clearRect(0, 0, width, this.height);
      pen.fillStyle = colours.lane;
      for (const { top, tall } of this.places) pen.fillRect(0, top, width, tall);
      this.drawAxis(pen);
      this.places.forEach((place, lane) => {
        pen.font = `600 13px ${FONT}`;
        pen.fillStyle = colours.ink;
        pen.textBaseline = "middle";
        const busy = `  ${this.line.busy[lane]} busy`;
        const room = width - 70;
        const name = cut(pen, this.line.streams[lane], room);
        pen.fillText(name, 0, place.caption + CAPTION / 2);
        const after = pen.measureText(name).width;
        pen.font = `13px ${FONT}`;
        pen.fillStyle = colours.soft;
        if (after + pen.measureText(busy).width <= width) pen.fillText(busy, after, place.caption + CAPTION / 2);
        place.rows.forEach((row, r) => this.drawRow(pen, row, place.top + r * place.row, place.row));
      });
      for (const [i, wide] of [[this.hovered, 2], [this.chosen, 3]]) if (i >= 0) this.outline(pen, i, wide);
      const bar = this.height - BAR + 4;
      pen.fillStyle = colours.line;
      pen.fillRect(0, bar, width, 6);
      if (view.to - view.from < total) {
        const long = Math.max(12, ((view.to - view.from) / total) * width);
        pen.fillStyle = colours.soft;
        pen.fillRect(Math.min((view.from / total) * width, width - long), bar, long, 6);
      }
    }

    drawAxis(pen) {
      const span = view.to - view.from, rough = (span * 90) / this.width;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
      const [factor, unit] = unitOf(view.to);
      const decimals = Math.max(0, -Math.floor(Math.log10(step / factor) + 1e-9));
      pen.font = `12px ${FONT}`;
      pen.textBaseline = "middle";
      let free = -1;
      for (let k = Math.ceil(view.from / step - 1e-9); k * step <= view.to * (1 + 1e-12); k++) {
        const x = this.x(k * step), text = `${(k * step / factor).toFixed(decimals)} ${unit}`;
        const line = Math.min(Math.round(x), this.width - 1);
        pen.fillStyle = colours.line;
        pen.fillRect(line, AXIS - 6, 1, 4);
        for (const { top, tall } of this.places) pen.fillRect(line, top, 1, tall);
        const wide = pen.measureText(text).width, left = Math.min(Math.max(0, x - wide / 2), this.width - wide);
        if (left < free) continue;
        pen.fillStyle = colours.soft;
        pen.fillText(text, left, AXIS / 2 - 2);
        free = left + wide + 8;
      }
    }

    drawRow(pen, row, top, height) {
      const { line } = this, y = top + 1, tall = height - 2;
      pen.font = `12px ${FONT}`;
      pen.textBaseline = "middle";
      for (let k = firstAfter(row, line.end, view.from); k < row.length && line.start[row[k]] < view.to; k++) {
        const i = row[k], from = this.x(line.start[i]), to = this.x(line.end[i]), style = fills[line.bound[i]];
        const left = Math.max(from, -4), wide = Math.min(to, this.width + 4) - left;
        pen.globalAlpha = this.dim?.[i] ? 0.2 : 1;
        // Below a pixel, a box is drawn as thin as it is, so that shades say how busy a stream is.
        pen.fillStyle = to > from ? style.fill : style.edge;
        pen.fillRect(left - (to > from ? 0 : 1), y, to > from ? wide : 2, tall);
        if (to - from < 3) continue;
        if (style.pattern) { pen.fillStyle = style.pattern; pen.fillRect(left, y, wide, tall); }
        const batch = line.batch[i];
        if (tones && batch !== null && tall > 24 && !this.dim?.[i]) band(pen, batch, left, y, wide);
        const opaque = pen.globalAlpha;
        pen.globalAlpha = opaque * Math.min(1, (to - from) / 12);
        pen.strokeStyle = style.edge;
        pen.strokeRect(left + 0.5, y + 0.5, wide - 1, tall - 1);
        pen.globalAlpha = opaque;
        const room = Math.min(to, this.width) - Math.max(from, 0) - 7;
        if (room < 8) continue;
        const text = this.label(pen, i, room);
        pen.fillStyle = colours.ink;
        if (text) pen.fillText(text, Math.max(from, 0) + 4, y + tall / 2 + (tones && tall > 24 ? 2.5 : 0.5));
      }
      pen.globalAlpha = 1;
    }

    /** The name if it fits, or its last part, whole or cut before the micro-batch, or the micro-batch alone. */
    label(pen, i, room) {
      const batch = this.line.batch[i], whole = this.line.names[this.line.name[i]];
      const name = tones ? whole : whole.replace(/\[\d+\]$/, ""); // one batch alone needs no number
      const last = name.slice(name.lastIndexOf("/") + 1);
      return [name, last].find((text) => measure(pen, text) <= room) ??
        (room > (tones ? 44 : 20) ? cut(pen, last, room) : tones && batch !== null && measure(pen, `[${batch}]`) <= room ? `[${batch}]` : "");
    }

    outline(pen, i, wide) {
      const place = this.places[this.line.stream[i]], top = place.top + this.line.row[i] * place.row;
      const from = Math.max(this.x(this.line.start[i]), -8), to = Math.min(this.x(this.line.end[i]), this.width + 8);
      if (to < -4 || from > this.width + 4) return;
      pen.strokeStyle = colours.focus;
      pen.lineWidth = wide;
      pen.strokeRect(from - 0.5, top - 0.5, Math.max(to - from, 1) + 1, place.row + 1);
      pen.lineWidth = 1;
    }

    at(x, y) {
      const place = this.places?.find(({ top, tall, rows }) => y >= top && y < top + tall && rows.length);
      if (!place) return -1;
      const row = place.rows[Math.floor((y - place.top) / place.row)], us = this.us(x), slack = this.us(3) - view.from;
      const k = firstAfter(row, this.line.end, us);
      let best = -1, distance = slack;
      for (const i of [row[k - 1], row[k]]) {
        if (i === undefined) continue;
        const away = Math.max(this.line.start[i] - us, us - this.line.end[i], 0);
        if (away < distance || (away === 0 && best < 0)) { best = i; distance = away; }
      }
      return best;
    }

    // -- what is pointed at -----------------------------------------------------------------------------------------

    listen() {
      const { box } = this, down = new Map();
      let moved = false, before = null, onBar = false;
      const point = (event) => { const { left, top } = box.getBoundingClientRect(); return [event.clientX - left, event.clientY - top]; };
      box.addEventListener("pointerdown", (event) => {
        const [x, y] = point(event);
        down.set(event.pointerId, x);
        before = null;
        moved = down.size > 1;
        onBar = down.size === 1 && y > this.height - BAR;
        box.setPointerCapture(event.pointerId);
        if (onBar) this.slide(x);
      });
      box.addEventListener("pointermove", (event) => {
        const [x, y] = point(event);
        if (!down.has(event.pointerId)) { this.hover(this.at(x, y), event); return; }
        const last = down.get(event.pointerId);
        if (onBar) { this.slide(x); return; }
        if (down.size === 1) {
          if (!moved && Math.abs(x - last) < still) return;
          moved = true;
          box.classList.add("dragged");
          pan(this.us(last) - this.us(x));
          down.set(event.pointerId, x);
        } else {
          down.set(event.pointerId, x);
          const [a, b] = [...down.values()], middle = (a + b) / 2, apart = Math.max(20, Math.abs(a - b));
          if (before) {
            pan(this.us(before.middle) - this.us(middle));
            zoom(before.apart / apart, this.us(middle));
          }
          before = { middle, apart };
        }
        this.hover(-1);
      });
      const up = (event) => {
        const [x, y] = point(event);
        if (event.type === "pointerup" && down.has(event.pointerId) && !moved && !onBar) this.choose(this.at(x, y), event);
        down.delete(event.pointerId);
        before = null;
        if (!down.size) box.classList.remove("dragged");
      };
      box.addEventListener("pointerup", up);
      box.addEventListener("pointercancel", up);
      box.addEventListener("pointerleave", () => this.hover(-1));
      box.addEventListener("wheel", (event) => {
        const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
        const pixels = (sideways ? event.deltaX || event.deltaY : event.deltaY) * (event.deltaMode ? 30 : 1);
        // A wheel that only scrolls by should not be caught: zooming asks for a key, a pinch, or a click before.
        if (sideways && view.to - view.from < total) pan((pixels / this.width) * (view.to - view.from));
        else if (!sideways && (event.ctrlKey || event.metaKey || document.activeElement === box))
          zoom(Math.exp(pixels * (event.ctrlKey ? 0.006 : 0.002)), this.us(point(event)[0]));
        else return;
        event.preventDefault();
        this.hover(-1);
      }, { passive: false });
      box.addEventListener("keydown", (event) => this.key(event));
      box.addEventListener("focus", () => { if (box.matches(":focus-visible") && this.chosen < 0) this.choose(this.step(0)); });
      box.addEventListener("blur", () => this.choose(-1));
    }
    slide(x) {
      const span = view.to - view.from, middle = (x / this.width) * total;
      show(middle - span / 2, middle + span / 2);
    }
    hover(i, event) {
      if (i !== this.hovered) { this.hovered = i; redraw(); }
      if (i >= 0) tell(this.line, i, event.clientX, event.clientY);
      else if (this.chosen < 0) tip.hidden = true;
      else this.point();
    }
    choose(i, event) {
      this.chosen = i;
      redraw();
      if (i < 0) { tip.hidden = true; return; }
      if (event) { tell(this.line, i, event.clientX, event.clientY); return; }
      const { start, end } = this.line, span = view.to - view.from;
      if (end[i] < view.from || start[i] > view.to || (start[i] < view.from && end[i] > view.to))
        show((start[i] + end[i] - span) / 2, (start[i] + end[i] + span) / 2);
      this.point();
      const rows = about(this.line, i).map((row) => row.join(" "));
      $("#said").textContent = [this.line.names[this.line.name[i]], ...rows].join(", ");
    }
    /** Shows the tip below the chosen event. */
    point() {
      const i = this.chosen, place = this.places[this.line.stream[i]], { left, top } = this.box.getBoundingClientRect();
      const middle = (Math.max(this.x(this.line.start[i]), 0) + Math.min(this.x(this.line.end[i]), this.width)) / 2;
      tell(this.line, i, left + middle, top + place.top + (this.line.row[i] + 1) * place.row);
    }
    /** The event so many after the chosen one on its row; the first that is shown if none is chosen. */
    step(by) {
      const { line } = this;
      if (this.chosen < 0) return line.end.findIndex((end) => end >= view.from);
      const row = this.lanes[line.stream[this.chosen]][line.row[this.chosen]];
      let k = row.indexOf(this.chosen) + by;
      while (this.dim && row[k] !== undefined && this.dim[row[k]]) k += by;
      return row[k] ?? this.chosen;
    }
    /** The event of the next row up or down that is nearest in time. */
    across(by) {
      const { line } = this, all = this.lanes.flat();
      if (this.chosen < 0) return this.step(0);
      const at = all.findIndex((row) => row.includes(this.chosen)), row = all[at + by];
      if (!row) return this.chosen;
      const us = (line.start[this.chosen] + line.end[this.chosen]) / 2, k = firstAfter(row, line.end, us);
      const away = (i) => (i === undefined ? Infinity : Math.max(line.start[i] - us, us - line.end[i], 0));
      return away(row[k - 1]) < away(row[k]) ? row[k - 1] : row[k];
    }
    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const { line } = this, span = view.to - view.from;
      const middle = this.chosen < 0 ? undefined : (line.start[this.chosen] + line.end[this.chosen]) / 2;
      const shift = event.shiftKey && event.key.startsWith("Arrow");
      const action = {
        ArrowLeft: () => (shift ? pan(-span / 4) : this.choose(this.step(-1))),
        ArrowRight: () => (shift ? pan(span / 4) : this.choose(this.step(1))),
        ArrowUp: () => this.choose(this.across(-1)),
        ArrowDown: () => this.choose(this.across(1)),
        Home: () => this.choose(0),
        End: () => this.choose(line.start.length - 1),
        Enter: () => { if (this.chosen >= 0) zoomTo(line.start[this.chosen], line.end[this.chosen]); },
        Escape: () => this.choose(-1),
        "+": () => zoom(0.6, middle), "=": () => zoom(0.6, middle), "-": () => zoom(1 / 0.6, middle),
        0: () => show(0, total),
      }[event.key];
      if (!action) return;
      event.preventDefault();
      action();
    }
  }

  const zoomTo = (start, end) => { const room = Math.max(end - start, least) * 1.5; show(start - room, end + room); };
  /** The first place in a row of disjoint events whose event does not end before a time. */
  const firstAfter = (row, end, us) => {
    let low = 0, high = row.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (end[row[middle]] >= us) high = middle; else low = middle + 1;
    }
    return low;
  };
  const widths = new Map();
  const measure = (pen, text) => {
    const key = pen.font + text;
    if (!widths.has(key)) widths.set(key, pen.measureText(text).width);
    return widths.get(key);
  };
  /** Text that fits, with an ellipsis before the micro-batch at its end where it has to be cut. */
  const cut = (pen, text, room) => {
    if (measure(pen, text) <= room) return text;
    const end = text.match(/(\[\d+\])?$/)[0], letters = Array.from(text.slice(0, text.length - end.length));
    const first = (count) => `${letters.slice(0, count).join("")}…${end}`;
    let low = 0, high = letters.length;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (pen.measureText(first(middle)).width <= room) low = middle; else high = middle - 1;
    }
    return low ? first(low) : "";
  };

  // -- the tip ------------------------------------------------------------------------------------------------------

  const tip = $("#tip");
  const element = (name, text) => { const made = document.createElement(name); made.textContent = text; return made; };
  const tell = (line, i, x, y) => {
    const list = document.createElement("dl");
    for (const [term, value] of about(line, i)) list.append(element("dt", term), element("dd", value));
    tip.replaceChildren(element("strong", line.names[line.name[i]]), list);
    tip.hidden = false;
    if (innerWidth <= NARROW) { tip.style.left = tip.style.top = ""; return; }
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${Math.max(8, y + 16 + height > innerHeight - 8 ? y - height - 16 : y + 16)}px`;
  };

  // -- the table ----------------------------------------------------------------------------------------------------

  const PAGE = 200;
  const table = (line, holder) => {
    let first = 0;
    const heads = ["Step", "Stream", "Micro-batch", "Start", "Time", "Bound", "FLOP", "Bytes", "Results"];
    const numeric = new Set([2, 3, 4, 6, 7]);
    const fill = () => {
      const chosen = line.start.map((_, i) => i).filter((i) => !wanted || line.names[line.name[i]].toLowerCase().includes(wanted));
      first = Math.max(0, Math.min(first, Math.floor((chosen.length - 1) / PAGE) * PAGE));
      const shown = chosen.slice(first, first + PAGE);
      const made = document.createElement("table"), head = made.createTHead().insertRow(), body = made.createTBody();
      made.createCaption().textContent = `${line.label}: ${chosen.length ? `steps ${first + 1} to ${first + shown.length} of ${chosen.length}` : "no steps"}`;
      heads.forEach((text, k) => { const cell = element("th", text); cell.scope = "col"; if (numeric.has(k)) cell.className = "number"; head.append(cell); });
      for (const i of shown) {
        const row = body.insertRow();
        [
          line.names[line.name[i]], line.streams[line.stream[i]], line.batch[i] ?? "", time(line.start[i]),
          time(line.end[i] - line.start[i]), bounds[line.bound[i]], si(line.flops[i], ""), si(line.bytes[i], "B"),
          line.shapes[line.shape[i]],
        ].forEach((text, k) => { const cell = row.insertCell(); cell.textContent = text; if (numeric.has(k)) cell.className = "number"; });
      }
      const turn = (text, by, off) => {
        const button = element("button", text);
        button.type = "button";
        button.disabled = off;
        button.addEventListener("click", () => { first += by; fill(); });
        return button;
      };
      const pages = document.createElement("p");
      if (chosen.length > PAGE) pages.append(turn("Previous", -PAGE, !first), " ", turn("Next", PAGE, first + PAGE >= chosen.length));
      holder.replaceChildren(made, pages);
    };
    fill();
    return fill;
  };

  // -- the page -----------------------------------------------------------------------------------------------------

  const charts = timelines.map((line, k) => new Chart(line, document.getElementById(`timeline-${k}`)));
  const repaint = () => { readColours(); legend(); redraw(); };
  $("#in").addEventListener("click", () => zoom(0.6));
  $("#out").addEventListener("click", () => zoom(1 / 0.6));
  $("#fit").addEventListener("click", () => show(0, total));
  let tables = null;
  $("details").addEventListener("toggle", () => {
    tables ??= [...document.querySelectorAll("details .scroll")].map((holder, k) => table(timelines[k], holder));
  });
  $("#find").addEventListener("input", (event) => {
    wanted = event.target.value.trim().toLowerCase();
    charts.forEach((chart) => chart.search());
    tables?.forEach((fill) => fill());
    redraw();
  });
  document.querySelectorAll("[data-shows]").forEach((input) => input.addEventListener("change", () => {
    document.getElementById(input.dataset.shows).hidden = !input.checked;
    redraw();
  }));
  addEventListener("scroll", () => { if (tip.hidden === false) charts.forEach((chart) => chart.hover(-1)); }, { passive: true });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  matchMedia("print").addEventListener("change", (event) => {
    readColours();
    legend();
    charts.forEach((chart) => chart.draw(event.matches ? 1000 : undefined));
  });
  new ResizeObserver(redraw).observe(document.body);
  readColours();
  legend();
  show(0, total);
})();
