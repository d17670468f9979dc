//! Misspelled names of variables. A setting under such a name would be ignored without a word.

use super::super::source::Launched;

/// Bonfire's variables that describe neither the rank nor its group: for the program and its launcher.
const OTHERS: [&str; 5] =
    ["BONFIRE_SECRET", "BONFIRE_SECRET_FILE", "BONFIRE_CUDA", "BONFIRE_CUDA_MULTIPROCESSORS", "BONFIRE_LAUNCHER"];

/// The most letters that differ between a name and what it was most likely meant to be.
const CLOSE: usize = 2;

/// Returns a warning for each of these names that looks like one of Bonfire's variables and is none.
pub fn unknown_variables(names: impl Iterator<Item = String>) -> Vec<String> {
    let known: Vec<&str> = Launched::VARIABLES[0].1.iter().chain(&OTHERS).copied().collect();
    let warning = |name: String| {
        let (letters, nearest) = known.iter().map(|known| (distance(&name, known), *known)).min()?;
        let is_close = letters <= CLOSE;
        let meant = if is_close { format!(": do you mean {nearest}?") } else { String::new() };
        (letters > 0 && (is_close || name.starts_with("BONFIRE_")))
            .then(|| format!("the variable {name} is set, but Bonfire has none of this name{meant}"))
    };
    let mut warnings: Vec<_> = names.filter_map(warning).collect();
    warnings.sort();
    warnings
}

/// Returns how many letters must be inserted, deleted or replaced to turn one name into the other (Levenshtein).
fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in other.bytes().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j].min(row[j + 1]) + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warnings(names: &[&str]) -> Vec<String> {
        unknown_variables(names.iter().map(|name| (*name).to_owned()))
    }

    #[test]
    fn the_distance_is_the_number_of_changed_letters() {
        for (one, other, letters) in [("", "", 0), ("", "ab", 2), ("abc", "abc", 0), ("kitten", "sitting", 3)] {
            assert_eq!((distance(one, other), distance(other, one)), (letters, letters), "{one} {other}");
        }
    }

    #[test]
    fn a_misspelled_variable_is_named_with_the_nearest_one() {
        for (name, meant) in [
            ("BONFIRE_TRANSPRT", "BONFIRE_TRANSPORT"),
            ("BONFIRE_DEADLINES", "BONFIRE_DEADLINE"),
            ("BONFIRE_SECRETFILE", "BONFIRE_SECRET_FILE"),
            ("BONFIR_TRACE", "BONFIRE_TRACE"),
        ] {
            let found = warnings(&["PATH", name, "HOME"]);
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(found[0].contains(name) && found[0].ends_with(&format!("do you mean {meant}?")), "{found:?}");
        }
        let nothing_near = "the variable BONFIRE_WEATHER_REPORT is set, but Bonfire has none of this name";
        assert_eq!(warnings(&["BONFIRE_WEATHER_REPORT"]), [nothing_near]);
    }

    #[test]
    fn known_and_foreign_variables_are_no_mistakes() {
        let known: Vec<&str> = Launched::VARIABLES[0].1.iter().chain(&OTHERS).copied().collect();
        assert!(warnings(&known).is_empty());
        assert!(warnings(&["RANK", "CAMPFIRE_RANK", "MASTER_ADDR", "BONFIRE"]).is_empty());
    }
}
