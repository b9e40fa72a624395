import unittest

from fairshare import Bill, parse_cents, show_cents


class MoneyTest(unittest.TestCase):
    def test_amounts_become_cents(self):
        self.assertEqual([parse_cents(text) for text in ("12", "12.5", "12.50", " 0.07 ")], [1200, 1250, 1250, 7])

    def test_nonsense_is_refused(self):
        for text in ("", "twelve", "1.234", "-3"):
            with self.subTest(text=text), self.assertRaises(ValueError):
                parse_cents(text)

    def test_cents_become_text(self):
        self.assertEqual(show_cents(1205), "12.05")


class BillTest(unittest.TestCase):
    def test_an_even_bill_is_shared_evenly(self):
        bill = Bill("Ann", "Bo")
        bill.add("9.50")
        bill.add("0.50")
        self.assertEqual(bill.shares(), {"Ann": 500, "Bo": 500})

    def test_no_cent_is_lost(self):
        bill = Bill("Ann", "Bo", "Cy")
        bill.add("10.00")
        self.assertEqual(bill.shares(), {"Ann": 334, "Bo": 333, "Cy": 333})

    def test_a_bill_needs_friends(self):
        with self.assertRaises(ValueError):
            Bill()


if __name__ == "__main__":
    unittest.main()
