// What stands before each program: the broken function, and ways to write another one.

import fs from 'node:fs';
import path from 'node:path';
import os from 'node:os';
import cp from 'node:child_process';

const PATH = process.env.ETUDE_PATH;
const NAME = process.env.ETUDE_FUNCTION.split('.').pop();
const TEXT = fs.readFileSync(PATH, 'utf8');
const ESM = /^\s*(export|import)\s/m.test(TEXT);

/** The braces of the function's body: [index after `{`, index of `}`]. */
function span() {
  const plain = NAME.replace(/[^\w$]/g, '');
  const heads = [
    new RegExp(`function\\s*\\*?\\s*${plain}\\s*\\(`), new RegExp(`(^|[\\s.])${plain}\\s*[:=]\\s*(async\\s+)?function[^(]*\\(`, 'm'),
    new RegExp(`^\\s*(static\\s+|async\\s+|get\\s+|set\\s+)*[*#]?${plain}\\s*\\(`, 'm'), new RegExp(`(^|[\\s.])${plain}\\s*=\\s*(async\\s*)?\\(`, 'm'),
    /module\.exports\s*=\s*function[^(]*\(/,
  ];
  for (const head of heads) {
    const found = head.exec(TEXT);
    if (!found) continue;
    let at = found.index + found[0].length, depth = 1;
    while (depth && at < TEXT.length) { if (TEXT[at] === '(') depth++; if (TEXT[at] === ')') depth--; at++; }
    const open = TEXT.indexOf('{', at);
    let end = open + 1;
    for (depth = 1; depth && end < TEXT.length; end++) {
      const c = TEXT[end];
      if (c === "'" || c === '"' || c === '`') { const q = c; for (end++; TEXT[end] !== q && end < TEXT.length; end++) if (TEXT[end] === '\\') end++; }
      else if (c === '/' && TEXT[end + 1] === '/') { while (TEXT[end] !== '\n') end++; }
      else if (c === '/' && TEXT[end + 1] === '*') { end = TEXT.indexOf('*/', end) + 1; }
      else if (c === '{') depth++;
      else if (c === '}') depth--;
    }
    return [open + 1, end - 1];
  }
  throw new Error('no such function');
}

/** Writes another body; `__broken()` in it stands for the broken body. */
function body(code) {
  const [from, to] = span();
  const broken = TEXT.slice(from, to);
  const arrow = /yield/.test(broken) ? '[]' : `(() => {${broken}\n})()`;
  fs.writeFileSync(PATH, TEXT.slice(0, from) + '\n' + code.replaceAll('__broken()', () => arrow) + '\n' + TEXT.slice(to));
}

/** Adds statements at the top of the module, behind imports and directives. */
function head(code) {
  const text = fs.readFileSync(PATH, 'utf8');
  const strict = /^(#!.*\n)?((\s|\/\*[\s\S]*?\*\/|\/\/.*\n)*['"]use strict['"];?)?/.exec(text)[0];
  fs.writeFileSync(PATH, strict + '\n' + code + '\n' + text.slice(strict.length));
}
