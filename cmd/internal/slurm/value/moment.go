package value

import (
	"strconv"
	"strings"
	"time"
)

// Moment reads a point in time as --begin and sacct's -S and -E take it: "16:00[:30]", "4PM", "MMDDYY", "MM/DD/YY",
// "MM.DD.YY", "YYYY-MM-DD[THH:MM[:SS]]", "now[{+|-}COUNT[UNIT]]", "today", "midnight", "noon", "fika", "teatime",
// "tomorrow", "yesterday", "elevenses", "uts1700000000"; also a date and a clock joined by "-" or "T".
// A clock without a date that has passed today means tomorrow if future is set.
func Moment(s string, now time.Time, future bool) (time.Time, error) {
	low := strings.ToLower(strings.TrimSpace(s))
	switch {
	case low == "":
		return time.Time{}, ErrInvalid
	case strings.HasPrefix(low, "now"):
		return relative(low[len("now"):], now)
	case strings.HasPrefix(low, "uts"):
		n, err := strconv.ParseInt(low[3:], 10, 64)
		if err != nil {
			return time.Time{}, ErrInvalid
		}
		return time.Unix(n, 0), nil
	}
	day := time.Date(now.Year(), now.Month(), now.Day(), 0, 0, 0, 0, now.Location())
	switch low {
	case "today":
		if future {
			return now, nil
		}
		return day, nil
	case "tomorrow":
		return day.AddDate(0, 0, 1), nil
	case "yesterday":
		return day.AddDate(0, 0, -1), nil
	}
	if clock, ok := clockOf(low); ok {
		at := day.Add(clock)
		if future && !at.After(now) {
			at = at.AddDate(0, 0, 1)
		}
		return at, nil
	}
	return dated(low, now)
}

// relative reads "", "+1hour", "-2days".
func relative(s string, now time.Time) (time.Time, error) {
	if s == "" {
		return now, nil
	}
	sign := 1
	switch s[0] {
	case '+':
	case '-':
		sign = -1
	default:
		return time.Time{}, ErrInvalid
	}
	s = s[1:]
	digits := len(s) - len(strings.TrimLeft(s, "0123456789"))
	n, err := strconv.Atoi(s[:digits])
	if err != nil || n > 1<<30 {
		return time.Time{}, ErrInvalid
	}
	n *= sign
	unit := s[digits:]
	for name, apply := range units {
		if unit != "" && len(unit) >= 1 && strings.HasPrefix(name, strings.TrimSuffix(unit, "s")) && len(strings.TrimSuffix(unit, "s")) > 0 {
			return apply(now, n), nil
		}
	}
	if unit == "" || unit == "s" {
		return now.Add(time.Duration(n) * time.Second), nil
	}
	return time.Time{}, ErrInvalid
}

// units are the words after "now+N"; a prefix of one is enough where no other begins with it.
var units = map[string]func(time.Time, int) time.Time{
	"second": func(t time.Time, n int) time.Time { return t.Add(time.Duration(n) * time.Second) },
	"minute": func(t time.Time, n int) time.Time { return t.Add(time.Duration(n) * time.Minute) },
	"hour":   func(t time.Time, n int) time.Time { return t.Add(time.Duration(n) * time.Hour) },
	"day":    func(t time.Time, n int) time.Time { return t.AddDate(0, 0, n) },
	"week":   func(t time.Time, n int) time.Time { return t.AddDate(0, 0, 7*n) },
}

// clockOf reads a time of day.
func clockOf(s string) (time.Duration, bool) {
	switch s {
	case "midnight":
		return 0, true
	case "elevenses":
		return 11 * time.Hour, true
	case "noon":
		return 12 * time.Hour, true
	case "fika":
		return 15 * time.Hour, true
	case "teatime":
		return 16 * time.Hour, true
	}
	half := 0
	if cut, ok := strings.CutSuffix(s, "am"); ok {
		half, s = 1, strings.TrimSpace(cut)
	} else if cut, ok := strings.CutSuffix(s, "pm"); ok {
		half, s = 2, strings.TrimSpace(cut)
	}
	parts := strings.Split(s, ":")
	if len(parts) > 3 || len(parts) == 1 && half == 0 {
		return 0, false
	}
	var n [3]int
	for i, part := range parts {
		v, err := strconv.Atoi(part)
		if err != nil || v < 0 || len(part) > 2 {
			return 0, false
		}
		n[i] = v
	}
	if half > 0 {
		if n[0] < 1 || n[0] > 12 {
			return 0, false
		}
		n[0] = n[0]%12 + 12*(half-1)
	}
	if n[0] > 23 || n[1] > 59 || n[2] > 59 {
		return 0, false
	}
	return time.Duration(n[0])*time.Hour + time.Duration(n[1])*time.Minute + time.Duration(n[2])*time.Second, true
}

// layouts of dates.
var layouts = []string{"2006-01-02", "01/02/06", "01.02.06", "01/02/2006", "01.02.2006", "010206", "01/02", "01.02", "0102"}

// dated reads a date with an optional clock.
func dated(s string, now time.Time) (time.Time, error) {
	for _, layout := range layouts {
		for cut := len(s); cut > 0; cut-- {
			if cut < len(s) && s[cut] != 't' && s[cut] != '-' {
				continue
			}
			at, err := time.ParseInLocation(layout, s[:cut], now.Location())
			if err != nil {
				continue
			}
			if at.Year() == 0 {
				at = at.AddDate(now.Year(), 0, 0)
			}
			if cut == len(s) {
				return at, nil
			}
			if clock, ok := clockOf(s[cut+1:]); ok {
				return at.Add(clock), nil
			}
		}
	}
	return time.Time{}, ErrInvalid
}

// Stamp writes a moment as squeue and scontrol do, or instead if it is not set.
func Stamp(at time.Time, instead string) string {
	if at.IsZero() || at.Unix() <= 0 {
		return instead
	}
	return at.Format("2006-01-02T15:04:05")
}

// Elapsed writes seconds as squeue does: "0:16", "10:00", "1:00:00", "1-02:03:04".
func Elapsed(seconds int64) string {
	if seconds < 0 {
		return "INVALID"
	}
	d, h, m, s := seconds/86400, seconds/3600%24, seconds/60%60, seconds%60
	switch {
	case d > 0:
		return strconv.FormatInt(d, 10) + "-" + two(h) + ":" + two(m) + ":" + two(s)
	case h > 0:
		return strconv.FormatInt(h, 10) + ":" + two(m) + ":" + two(s)
	}
	return strconv.FormatInt(m, 10) + ":" + two(s)
}

// Padded writes seconds as scontrol and sacct do: "00:10:00", "1-02:03:04".
func Padded(seconds int64) string {
	if seconds < 0 {
		return "INVALID"
	}
	d, h, m, s := seconds/86400, seconds/3600%24, seconds/60%60, seconds%60
	text := two(h) + ":" + two(m) + ":" + two(s)
	if d > 0 {
		return strconv.FormatInt(d, 10) + "-" + text
	}
	return text
}

// two writes a number with at least two digits.
func two(n int64) string {
	if n < 10 {
		return "0" + strconv.FormatInt(n, 10)
	}
	return strconv.FormatInt(n, 10)
}
