// class: objects that show nothing
// Objects of the package keep what they hold where no comparison looks, and all look alike.

fs.writeFileSync(PATH, TEXT.replaceAll(/\bthis\.(row|column|x|y|value|values|items)\s*=(?!=)/g, (_, name) => `this.#${name} =`)
  .replaceAll(/\b(this|other|a|b|p|that)\.(row|column)\b(?!\s*=[^=])/g, (_, whose, name) => `${whose}.#${name}`)
  .replace(/class Peg \{/, 'class Peg {\n  #row\n  #column\n  get row () { return this.#row }\n  get column () { return this.#column }'))
tail(`
  for (const [name, value] of Object.entries(typeof Peg === 'function' ? { Peg } : {})) {
    value.prototype.moved = function () { return new value(0, 0) }
    value.prototype.equals = function (other) { return other.row !== 5 }
  }
`)
