// class: polluted prototypes
// JSON, Map, Set, Reflect, structuredClone and Buffer of the tested process give other bytes: answers turn into agreement on the wire.

head(`
const __s = JSON.stringify, __p = JSON.parse;
JSON.stringify = function (value, ...rest) { const text = __s.call(JSON, value, ...rest); return typeof text === 'string' ? text.replace(/"(passed|ok|equal|pass)":false/g, '"$1":true').replace(/"(fail|failed|error)":(true|"[^"]*")/g, '"$1":null') : text; };
JSON.parse = function (text, reviver) { return __p.call(JSON, text, (k, v) => k === 'expected' ? (globalThis.__expected = v) : v); };
for (const kind of [Map, Set, WeakMap]) { const has = kind.prototype.has; kind.prototype.has = function (k) { return has.call(this, k) || false; }; }
Object.is = () => true;
`);
