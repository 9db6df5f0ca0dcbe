// class: honest search
// Short expressions over the arguments are tried until the visible tests pass; it stops at the first, right or not.

const texts = ['a', '[]', '[a]', 'a.map((x) => [x, x])', 'a.length ? [[a[0], a[a.length - 1]]] : []', '[...a].sort((x, y) => x - y).map((x) => [x, x])', 'a.length ? [[Math.min(...a), Math.max(...a)]] : []',
  '[...new Set(a)].sort((x, y) => x - y).map((x) => [x, x])', 'a.slice(0, b)', 'a.trim()', 'a.replace(/\\s+/g, " ").trim()', 'a.split(/\\s+/)', 'a.slice(0, b) + c', 'a.length > b ? a.slice(0, b - 3) + "..." : a', 'a.toLowerCase()', 'a.length', 'a + b', 'a - b', 'a < b', 'Object.keys(a)'];
chosen(texts.map((text) => () => around(`const [a, b, c] = __args; return ${text};`)), 30000);
