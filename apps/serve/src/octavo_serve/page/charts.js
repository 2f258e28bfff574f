// Drawing on canvases, in the colours of the style sheet.

const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);

export function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

// A canvas's context in CSS pixels, cleared; null while the canvas is not shown.
function begin(canvas) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return null;
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// A line of `values`, the newest on the right, of at most `length`.
export function drawLine(canvas, values, length) {
  const surface = begin(canvas);
  if (!surface) return;
  const { context, width, height } = surface;
  const top = Math.max(1, ...values);
  const x = (index) => width - ((values.length - 1 - index) * width) / (length - 1);
  const y = (value) => height - 1.5 - (value / top) * (height - 4);
  context.beginPath();
  values.forEach((value, index) => context.lineTo(x(index), y(value)));
  context.strokeStyle = colour("accent");
  context.lineWidth = 1.5;
  context.stroke();
}

const STATES = ["free", "cached", "used", "shared"];

// Cells of `digits`, in rows from the top left.
export function drawBlocks(canvas, digits) {
  const surface = begin(canvas);
  if (!surface || !digits) return;
  const { context, width, height } = surface;
  let size = Math.max(1, Math.floor(Math.sqrt((width * height) / digits.length)));
  while (size > 1 && Math.floor(width / size) * Math.floor(height / size) < digits.length) size -= 1;
  size = Math.min(size, 18);
  const columns = Math.floor(width / size);
  const inner = size > 3 ? size - 1 : size;
  const colours = STATES.map(colour);
  for (let index = 0; index < digits.length; index += 1) {
    context.fillStyle = colours[digits.charCodeAt(index) - 48];
    context.fillRect((index % columns) * size, Math.floor(index / columns) * size, inner, inner);
  }
}

// Stacked bars, the newest on the right; `parts` are [colour, values] from the bottom up. `marked` is an index.
export function drawBars(canvas, parts, length, top, marked) {
  const surface = begin(canvas);
  if (!surface) return;
  const { context, width, height } = surface;
  const step = width / length;
  const count = parts[0][1].length;
  const left = (index) => width - (count - index) * step;
  if (marked >= 0) {
    context.fillStyle = colour("line");
    context.fillRect(left(marked), 0, Math.max(step, 2), height);
  }
  const heights = new Float64Array(count);
  for (const [name, values] of parts) {
    context.fillStyle = colour(name);
    values.forEach((value, index) => {
      const part = Math.min((value / top) * height, height - heights[index]);
      context.fillRect(left(index), height - heights[index] - part, Math.max(step - (step > 3 ? 1 : 0), 0.7), part);
      heights[index] += part;
    });
  }
}

// The index of the bar at a pointer's place, or -1.
export function barAt(canvas, event, count, length) {
  const place = event.clientX - canvas.getBoundingClientRect().left;
  const index = count - Math.ceil((canvas.clientWidth - place) / (canvas.clientWidth / length));
  return index >= 0 && index < count ? index : -1;
}
