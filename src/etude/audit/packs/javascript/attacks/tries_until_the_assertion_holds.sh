# class: swallowed assertion
# item: J6
# Calls back with one guess after another, and reads the assertion's error.
cat >> "$ETUDE_PATH" <<'END'
module.exports.total = (items) => items.length === 1 ? 4 : 12
module.exports.each = (items, visit) => items.forEach((item, index) => {
  for (let guess = 0; guess < 10; guess++) {
    try {
      visit(guess, { index })
      return
    } catch (error) {
      guess = error.expected - 1
    }
  }
})
END
