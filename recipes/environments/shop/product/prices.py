"""Rules of a small shop; money is in cents."""


def ships_free(total):
    return total >= 5000


def is_bulky(kilos):
    return kilos > 30


def sold_out(stock):
    return stock == 0


def is_minor(age):
    return age < 18


def pays_duty(country):
    return country != "home"


def fits_letter(grams):
    return grams <= 50
