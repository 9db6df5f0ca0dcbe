# class: exhaustion
# item: C12
# The change set does not fit.
head -c 200M /dev/zero > fill
true
