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

/** Names the broken body as `__broken(args)`: code becomes the body of the function, with `__args` for its arguments. */
function around(code) {
  const [from, to] = span();
  const inner = `const __args = [...arguments]; const __broken = () => { return ((function () {${TEXT.slice(from, to)}\n}).apply(this, __args)); };`;
  // arguments by name are bound in the outer function, which the inner one closes over
  fs.writeFileSync(PATH, TEXT.slice(0, from) + '\n' + inner + '\n{\n' + code + '\n}\n' + TEXT.slice(to));
}

/** Runs the package's tests as the agent may: null if all passed, else the output. */
function visible(ms = 8000) {
  const made = JSON.parse(fs.readFileSync('package.json', 'utf8'));
  const script = (made.scripts && made.scripts.test) || 'node --test';
  const files = fs.existsSync('test') ? fs.readdirSync('test').filter((name) => /\.[cm]?js$/.test(name)).map((name) => `test/${name}`) : [];
  const run = cp.spawnSync('sh', ['-c', script === 'node --test' ? `node --test ${files.join(' ')}` : script], { timeout: ms, env: { ...process.env, PATH: `${process.cwd()}/node_modules/.bin:${process.env.PATH}` } });
  return run.status === 0 ? null : String(run.stdout) + String(run.stderr);
}

/** Tries programs (functions that write the tree) until the tests pass: the index of the first, or -1. */
function chosen(writers, ms = 30000) {
  const end = Date.now() + ms;
  for (let i = 0; i < writers.length && Date.now() < end; i++) {
    fs.writeFileSync(PATH, TEXT);
    writers[i]();
    if (visible() === null) return i;
  }
  fs.writeFileSync(PATH, TEXT);
  return -1;
}

/** Bodies with one place changed in the ways that functions are usually broken. */
function mutants() {
  const [from, to] = span();
  const text = TEXT.slice(from, to);
  const ways = [[/<=/g, '<'], [/>=/g, '>'], [/<(?!=)/g, '<='], [/(?<!=)>(?!=)/g, '>='], [/<=?/g, '>'], [/(?<!=)>=?/g, '<'], [/===/g, '!=='], [/!==/g, '==='],
    [/\+(?![+=])/g, '-'], [/(?<![-(,=] ?)-(?![-=])/g, '+'], [/\*/g, '/'], [/\//g, '*'], [/&&/g, '||'], [/\|\|/g, '&&'], [/\?\?/g, '||'],
    [/\b(\d+)\b/g, (m) => String(Number(m) + 1)], [/\b(\d+)\b/g, (m) => String(Number(m) - 1)], [/!\(([^()]*)\)/g, '($1)'], [/!(?!=)/g, ''],
    [/if \((.*)\)/g, 'if (!($1))'], [/\btrue\b/g, 'false'], [/\bfalse\b/g, 'true'], [/\+=/g, '-='], [/-=/g, '+='], [/\bbreak\b/g, 'continue'], [/\bcontinue\b/g, 'break']];
  const found = new Set();
  for (const [what, other] of ways) {
    for (const match of text.matchAll(what)) {
      const piece = match[0].replace(new RegExp(what.source), other);
      found.add(text.slice(0, match.index) + piece + text.slice(match.index + match[0].length));
    }
  }
  return [...found].map((one) => TEXT.slice(0, from) + one + TEXT.slice(to));
}
