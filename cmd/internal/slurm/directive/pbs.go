package directive

import (
	"fmt"
	"strings"
)

// pbsPlain are PBS options that have the same meaning in Slurm under another name.
var pbsPlain = map[byte]string{
	'A': "--account=", 'a': "--begin=", 'N': "--job-name=", 'o': "--output=", 'e': "--error=", 'q': "--partition=",
}

// pbsResources are the names after -l that have one counterpart.
var pbsResources = map[string]string{
	"walltime": "--time=", "mem": "--mem=", "ncpus": "--cpus-per-task=", "nodes": "--nodes=",
}

// translate turns the words of a "#PBS" line into options of sbatch.
func translate(name string, number int, words []string) ([]string, error) {
	bad := func(format string, args ...any) error {
		return refuse(fmt.Sprintf("%s: line %d: #PBS ", name, number) + fmt.Sprintf(format, args...))
	}
	var out []string
	for i := 0; i < len(words); i++ {
		word := words[i]
		if len(word) < 2 || word[0] != '-' {
			return nil, bad("%s is not an option", word)
		}
		letter, value := word[1], word[2:]
		switch letter {
		case 'h':
			out = append(out, "--hold")
			continue
		case 'V':
			out = append(out, "--export=ALL")
			continue
		}
		if value == "" {
			if i+1 == len(words) {
				return nil, bad("-%c needs a value", letter)
			}
			i++
			value = words[i]
		}
		switch plain := pbsPlain[letter]; {
		case plain != "":
			out = append(out, plain+value)
		case letter == 'r' && (value == "y" || value == "n"):
			out = append(out, map[string]string{"y": "--requeue", "n": "--no-requeue"}[value])
		case letter == 'j' && value == "oe", letter == 'S':
			// Output and error share a file unless told otherwise, and the interpreter is the script's first line.
		case letter == 'l':
			for resource := range strings.SplitSeq(value, ",") {
				key, amount, _ := strings.Cut(resource, "=")
				if pbsResources[key] == "" || amount == "" || strings.Contains(amount, "=") || key == "nodes" && strings.Contains(amount, ":") {
					return nil, bad("-l %s is not supported: say it with an #SBATCH line", resource)
				}
				out = append(out, pbsResources[key]+amount)
			}
		default:
			return nil, bad("-%c is not supported: say it with an #SBATCH line, or give --ignore-pbs", letter)
		}
	}
	return out, nil
}
