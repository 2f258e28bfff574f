// One tooltip for all: of terms, by their data-tip, and of whatever else asks for it.

const tip = document.getElementById("tip");
let owner = null;

export function showTip(element, text) {
  owner?.removeAttribute("aria-describedby");
  owner = element;
  tip.textContent = text;
  tip.hidden = false;
  element.setAttribute("aria-describedby", "tip");
  const at = element.getClientRects()[0] ?? element.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left), innerWidth - size.width - 8);
  const above = at.top - size.height - 6;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above >= 4 ? above : Math.min(at.bottom + 6, innerHeight - size.height - 4)}px`;
}

export function hideTip() {
  owner?.removeAttribute("aria-describedby");
  owner = null;
  tip.hidden = true;
}

export const isTipShown = () => !tip.hidden;

function termOf(event) {
  return event.target instanceof Element ? event.target.closest("[data-tip]") : null;
}

for (const kind of ["pointerover", "focusin"]) {
  document.addEventListener(kind, (event) => {
    const term = termOf(event);
    if (term) showTip(term, term.dataset.tip);
  });
}
for (const kind of ["pointerout", "focusout"]) {
  document.addEventListener(kind, (event) => {
    if (termOf(event)) hideTip();
  });
}
document.addEventListener("click", (event) => {
  const term = termOf(event);
  if (term) showTip(term, term.dataset.tip);
});
addEventListener("scroll", hideTip, true);
