package pmi

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
)

const (
	// maxLine is the longest line of PMI-1; libraries send at most 1,024 bytes.
	maxLine = 4096
	// maxMessage is the longest message of PMI-2, as its library has it.
	maxMessage = 64 << 10
	// maxFields bounds the fields of a line or message, and the lines of a command that has several.
	maxFields = 1024
	// lengthDigits is the width of the length before a message of PMI-2.
	lengthDigits = 6
)

// malformed is what a task said that is neither PMI-1 nor PMI-2.
type malformed struct{ text string }

func (m *malformed) Error() string { return m.text }

func malformedf(format string, args ...any) error { return &malformed{fmt.Sprintf(format, args...)} }

// command is what a task asks: its name and further fields. The first field of a name counts.
type command struct {
	name   string
	fields map[string]string
}

func (c command) field(name string) string { return c.fields[name] }

func (c *command) add(name, value string) error {
	if len(c.fields) >= maxFields {
		return malformedf("a command has more than %d fields", maxFields)
	}
	if _, twice := c.fields[name]; !twice {
		c.fields[name] = value
	}
	return nil
}

// readLine reads a command of PMI-1: one line "cmd=NAME FIELD=VALUE …", or several from "mcmd=NAME" to "endcmd". The
// reader's buffer holds at least maxLine bytes. io.EOF means that nothing follows.
func readLine(r *bufio.Reader) (command, error) {
	line, err := oneLine(r)
	if err != nil {
		return command{}, err
	}
	c := command{fields: make(map[string]string)}
	if name, several := strings.CutPrefix(line, "mcmd="); several {
		c.name = strings.TrimSpace(name)
		return c, c.untilEnd(r)
	}
	for word := range strings.FieldsSeq(line) {
		name, value, ok := strings.Cut(word, "=")
		if !ok {
			return command{}, malformedf("%.40q in a command is not NAME=VALUE", word)
		}
		if err := c.add(name, value); err != nil {
			return command{}, err
		}
	}
	if c.name = c.fields["cmd"]; c.name == "" {
		return command{}, malformedf("the line %.40q names no command", line)
	}
	return c, nil
}

func oneLine(r *bufio.Reader) (string, error) {
	b, err := r.ReadSlice('\n')
	switch {
	case errors.Is(err, bufio.ErrBufferFull) || len(b) > maxLine:
		return "", malformedf("a line has more than %d bytes", maxLine)
	case errors.Is(err, io.EOF) && len(b) > 0:
		return "", malformedf("a line ends in the middle")
	case err != nil:
		return "", err
	}
	return string(b[:len(b)-1]), nil
}

// untilEnd reads the lines of a command that has several, one field each.
func (c *command) untilEnd(r *bufio.Reader) error {
	for range maxFields {
		line, err := oneLine(r)
		if errors.Is(err, io.EOF) {
			return malformedf("the command %.40q does not end", c.name)
		}
		if err != nil {
			return err
		}
		if strings.TrimSpace(line) == "endcmd" {
			return nil
		}
		name, value, _ := strings.Cut(line, "=")
		if err := c.add(name, value); err != nil {
			return err
		}
	}
	return malformedf("the command %.40q has more than %d lines", c.name, maxFields)
}

// readMessage reads a command of PMI-2: six digits of length, padded with blanks, then "cmd=NAME;FIELD=VALUE;…".
func readMessage(r io.Reader) (command, error) {
	var head [lengthDigits]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			err = malformedf("a message ends within its length")
		}
		return command{}, err
	}
	n, digits := 0, bytes.Trim(head[:], " ")
	for _, d := range digits {
		if d < '0' || d > '9' {
			return command{}, malformedf("%q is not the length of a message", head)
		}
		n = 10*n + int(d-'0')
	}
	if len(digits) == 0 || n == 0 || n > maxMessage {
		return command{}, malformedf("a message of %q bytes; 1 to %d are allowed", head, maxMessage)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = malformedf("a message ends in the middle")
		}
		return command{}, err
	}
	return parseMessage(string(body))
}

// parseMessage reads "cmd=NAME;FIELD=VALUE;…". A doubled semicolon in a value stands for one.
func parseMessage(text string) (command, error) {
	c := command{fields: make(map[string]string)}
	if strings.ContainsRune(text, 0) {
		return c, malformedf("a message contains NUL")
	}
	for rest := text; rest != ""; {
		name, after, ok := strings.Cut(rest, "=")
		if !ok || name == "" || strings.Contains(name, ";") {
			return c, malformedf("%.40q in a message is not NAME=VALUE", rest)
		}
		var value string
		value, rest = untilSemicolon(after)
		if err := c.add(name, value); err != nil {
			return c, err
		}
	}
	if c.name = c.fields["cmd"]; c.name == "" {
		return c, malformedf("the message %.40q names no command", text)
	}
	return c, nil
}

// untilSemicolon splits at the first semicolon that is not doubled, and undoubles those before it.
func untilSemicolon(text string) (value, rest string) {
	var b strings.Builder
	for i := 0; i < len(text); i++ {
		if text[i] == ';' {
			if i+1 == len(text) || text[i+1] != ';' {
				return b.String(), text[i+1:]
			}
			i++
		}
		b.WriteByte(text[i])
	}
	return b.String(), ""
}

// message makes an answer of PMI-2; fields are names and values in turn.
func message(name string, fields ...string) []byte {
	var b strings.Builder
	b.WriteString("cmd=" + name + ";")
	for i := 0; i+1 < len(fields); i += 2 {
		b.WriteString(fields[i] + "=" + strings.ReplaceAll(fields[i+1], ";", ";;") + ";")
	}
	return fmt.Appendf(nil, "%*d%s", lengthDigits, b.Len(), b.String())
}
