//go:build linux

package guest

// pageScript are the functions that run in a page, in a world of their own.
const pageScript = `
const clip = (s, n) => { s = String(s ?? '').replace(/\s+/g, ' ').trim(); return (s.length > n ? s.slice(0, n) + '…' : s).toWellFormed(); };
const visible = e => {
  const r = e.getBoundingClientRect();
  return r.width > 0 && r.height > 0 && getComputedStyle(e).visibility !== 'hidden';
};
const all = s => [...document.querySelectorAll(s)];
const only = (s, e) => { try { const m = all(s); return m.length === 1 && m[0] === e; } catch { return false; } };
const selectorOf = e => {
  const tag = CSS.escape(e.localName);
  if (e.id && only('#' + CSS.escape(e.id), e)) return '#' + CSS.escape(e.id);
  for (const a of ['name', 'data-testid', 'aria-label', 'placeholder', 'href', 'title', 'value', 'type']) {
    const v = e.getAttribute(a);
    if (!v || v.length > 100 || /[\n\r\f]/.test(v)) continue;
    const s = tag + '[' + a + '="' + v.replace(/["\\]/g, '\\$&') + '"]';
    if (only(s, e)) return s;
  }
  let path = '';
  for (let n = e; n && n !== document.documentElement; n = n.parentElement) {
    if (n !== e && n.id && only('#' + CSS.escape(n.id) + ' > ' + path, e)) return '#' + CSS.escape(n.id) + ' > ' + path;
    const same = n.parentElement ? [...n.parentElement.children].filter(o => o.localName === n.localName) : [n];
    const part = CSS.escape(n.localName) + (same.length > 1 ? ':nth-of-type(' + (same.indexOf(n) + 1) + ')' : '');
    path = path ? part + ' > ' + path : part;
    if (only(path, e)) return path;
  }
  return path;
};
const kindOf = e => {
  const t = e.localName, role = e.getAttribute('role');
  if (role) return role;
  if (t === 'a') return 'link';
  if (t === 'input') return ['button', 'submit', 'reset', 'image'].includes(e.type) ? 'button' : e.type + ' field';
  if (t === 'textarea' || e.isContentEditable) return 'text field';
  if (t === 'select') return 'choice';
  return t;
};
const nameOf = e => clip(e.getAttribute('aria-label') || (e.labels && e.labels.length ? e.labels[0].innerText : '') || e.innerText ||
  e.placeholder || e.title || e.alt || (kindOf(e) === 'button' ? e.value : '') || e.name || '', 80);
const valueOf = e => {
  if (e.localName === 'a') return clip(e.getAttribute('href'), 150);
  if (e.localName === 'select') return clip((e.selectedOptions[0] || {}).label, 60) + ' of ' + clip([...e.options].slice(0, 20).map(o => o.label).join(' | '), 300);
  if (e.type === 'checkbox' || e.type === 'radio') return e.checked ? 'checked' : 'not checked';
  if (e.type === 'password') return e.value ? '(hidden)' : '';
  if (kindOf(e) !== 'button' && 'value' in e && typeof e.value === 'string') return e.value ? JSON.stringify(clip(e.value, 100)) : '';
  return e.disabled ? '(disabled)' : '';
};
const useful = 'a[href],button,input:not([type=hidden]),select,textarea,summary,[role=button],[role=link],[role=checkbox],[role=radio],[role=tab],[role=menuitem],[role=option],[role=switch],[contenteditable=""],[contenteditable=true],[onclick]';
const show = (chars, elements) => {
  const text = document.body ? (document.body.innerText ?? document.body.textContent ?? '') : '';
  const nav = performance.getEntriesByType('navigation')[0];
  const list = all(useful).filter(visible);
  return {
    Title: clip(document.title, 300), URL: location.href.slice(0, 2000), Text: text.slice(0, chars).toWellFormed(), More: Math.max(0, text.length - chars),
    Status: nav && nav.responseStatus || 0, Frames: all('iframe,frame').filter(visible).length, Hidden: Math.max(0, list.length - elements),
    Elements: list.slice(0, elements).map(e => ({Selector: selectorOf(e), Kind: kindOf(e), Name: nameOf(e), Value: valueOf(e)})),
  };
};
const one = selector => {
  let m;
  try { m = all(selector); } catch (e) { return {error: 'is no CSS selector'}; }
  if (m.length !== 1) {
    const seen = m.filter(visible);
    if (seen.length !== 1) return {count: m.length, some: m.slice(0, 10).map(e => selectorOf(e) + ': ' + kindOf(e) + ' ' + JSON.stringify(nameOf(e)))};
    m = seen;
  }
  return {count: 1, element: m[0]};
};
const point = selector => {
  const f = one(selector), e = f.element;
  if (!e) return f;
  if (e.disabled) return {error: 'the element is disabled'};
  e.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});
  const r = [...e.getClientRects()].find(r => r.width > 0 && r.height > 0);
  if (!r) return {error: 'the element is not visible'};
  const x = Math.min(Math.max(r.left + r.width / 2, 0), innerWidth - 1), y = Math.min(Math.max(r.top + r.height / 2, 0), innerHeight - 1);
  const top = document.elementFromPoint(x, y);
  const same = top && (top === e || e.contains(top) || top.contains(e) || top.shadowRoot || (e.labels && [...e.labels].some(l => l.contains(top))));
  return {count: 1, x, y, covered: same || !top ? '' : selectorOf(top)};
};
const fill = (selector, text) => {
  const f = one(selector), e = f.element;
  if (!e) return f;
  if (e.disabled || e.readOnly) return {error: 'the element cannot be changed'};
  const tell = () => { for (const t of ['input', 'change']) e.dispatchEvent(new Event(t, {bubbles: true})); };
  e.scrollIntoView({block: 'center', behavior: 'instant'});
  if (e.localName === 'select') {
    const o = [...e.options].find(o => o.value === text) || [...e.options].find(o => o.label.trim() === text.trim());
    if (!o) return {error: 'has no option ' + JSON.stringify(clip(text, 60)) + '; there are ' + clip([...e.options].map(o => o.label).join(' | '), 200)};
    e.focus(); e.value = o.value; tell();
    return {count: 1, kind: 'done'};
  }
  if (e.localName === 'input' && ['checkbox', 'radio', 'button', 'submit', 'reset', 'image'].includes(e.type)) return {error: 'is no field for text; use click'};
  if (e.localName === 'input' && e.type === 'file') return {error: 'takes a file, which this tool cannot give'};
  if (e.localName === 'input' && ['date', 'time', 'month', 'week', 'datetime-local', 'color', 'range'].includes(e.type) || e.value !== undefined && text === '') {
    e.focus(); e.value = text; tell();
    return {count: 1, kind: 'done'};
  }
  e.focus();
  if (e.localName === 'input' || e.localName === 'textarea') { e.select(); return {count: 1, kind: 'keys'}; }
  if (!e.isContentEditable) return {error: 'is no field for text'};
  getSelection().selectAllChildren(e);
  if (text === '') { e.textContent = ''; tell(); return {count: 1, kind: 'done'}; }
  return {count: 1, kind: 'keys'};
};`
