//! Which path carries an operation, by its size: tables that users read and write.

use std::fmt;
use std::str::FromStr;

use super::{Algorithm, table};
use crate::types::{Call, Error, Operation};

/// Which algorithm runs an operation, by the size of its whole in bytes (as `bonfire perf` counts it).
///
/// As text, which is also the form of `BONFIRE_ALGORITHMS`: paths with the sizes that they are for, from 0 on without
/// gaps. A path is an [`Algorithm`], or `native`: the transport's own way, in memory that threads, or processes of one
/// host, share. Where a transport has none, `native` is what it does by default.
///
/// ```
/// # use bonfire_core::Selection;
/// // Every operation. One that lacks an algorithm takes the nearest that it has.
/// let all: Selection = "direct:0-65536;ring:65537-".parse()?;
/// // Some operations, which must have the algorithms; the others stay with the default.
/// let some: Selection = "all_reduce=native:0-65535;ring:65536-,broadcast=tree:0-".parse()?;
/// assert_eq!(some.to_string(), "all_reduce=native:0-65535;ring:65536-,broadcast=tree:0-");
/// # Ok::<(), bonfire_core::Error>(())
/// ```
///
/// Both may be together: first what is for all, then the exceptions. `default` is the default for every operation, as
/// [`Selection::default`] is: `native` where the transport has it, else plans by the number of ranks and the size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// For operations that are not in `own`.
    common: Option<Table>,
    /// In the order of operations, each at most once.
    own: Vec<(Operation, Table)>,
}

/// How operations of some sizes are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// By the transport's engine.
    Native,
    Plan(Algorithm),
}

/// Paths, each with the smallest size that it is for, as in [`table::at`].
#[derive(Clone, Debug, PartialEq, Eq)]
struct Table(Vec<(Path, usize)>);

impl Selection {
    /// The algorithm for `call`, or none where it is left to the engine, if there is one.
    pub(crate) fn plan(&self, call: &Call, world_size: usize, engine: bool) -> Option<Algorithm> {
        if call.operation == Operation::AllToAllV {
            // No engine has it: only each pair of ranks knows what is between them.
            return Some(Algorithm::Direct);
        }
        match self.path(call.operation, call.bytes(), world_size, engine) {
            Path::Native => None,
            Path::Plan(algorithm) => Some(algorithm),
        }
    }

    fn path(&self, operation: Operation, bytes: usize, world_size: usize, engine: bool) -> Path {
        let chosen = match (self.own.iter().find(|(of, _)| *of == operation), &self.common) {
            (Some((_, table)), _) => table::at(&table.0, bytes),
            (None, Some(table)) => match table::at(&table.0, bytes) {
                Path::Plan(algorithm) => Path::Plan(algorithm.nearest(operation)),
                Path::Native => Path::Native,
            },
            (None, None) => Path::Native,
        };
        match chosen {
            Path::Native if !engine => Path::Plan(table::plan(operation, bytes, world_size)),
            chosen => chosen,
        }
    }

    /// Whether some operation of some size is left to an engine.
    #[cfg(unix)]
    pub(crate) fn is_native_anywhere(&self) -> bool {
        let in_table = |table: &Table| table.0.iter().any(|(path, _)| *path == Path::Native);
        let unnamed = SELECTABLE.iter().any(|operation| self.own.iter().all(|(own, _)| own != operation));
        self.own.iter().any(|(_, table)| in_table(table)) || (unnamed && self.common.as_ref().is_none_or(in_table))
    }

    /// What this comes to for one operation, defaults included.
    pub(crate) fn in_effect(&self, operation: Operation, world_size: usize, engine: bool) -> Selection {
        if !SELECTABLE.contains(&operation) {
            return Selection::default();
        }
        let tables = self.own.iter().map(|(_, table)| table).chain(&self.common);
        let defaults = table::plans(operation, world_size).iter().map(|(_, from)| *from);
        let mut edges: Vec<usize> = tables.flat_map(|table| &table.0).map(|(_, from)| *from).chain(defaults).collect();
        edges.sort_unstable();
        let mut table: Vec<(Path, usize)> = Vec::new();
        for from in edges {
            let path = self.path(operation, from, world_size, engine);
            if table.last().is_none_or(|(last, _)| *last != path) {
                table.push((path, from));
            }
        }
        Selection { common: None, own: vec![(operation, Table(table))] }
    }
}

/// One algorithm for every operation, whatever its size; an operation that lacks it takes the nearest that it has.
impl From<Algorithm> for Selection {
    fn from(algorithm: Algorithm) -> Self {
        Selection { common: Some(Table(vec![(Path::Plan(algorithm), 0)])), own: Vec::new() }
    }
}

/// What a table may be for: messages between two ranks have one path only, and so has what every pair does for itself.
pub(super) const SELECTABLE: [Operation; 9] = [
    Operation::AllReduce,
    Operation::Reduce,
    Operation::Broadcast,
    Operation::AllGather,
    Operation::ReduceScatter,
    Operation::Barrier,
    Operation::AllToAll,
    Operation::Gather,
    Operation::Scatter,
];

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Path::Native => f.write_str("native"),
            Path::Plan(algorithm) => write!(f, "{algorithm}"),
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (path, from)) in self.0.iter().enumerate() {
            write!(f, "{}{path}:{from}-", if i == 0 { "" } else { ";" })?;
            if let Some((_, next)) = self.0.get(i + 1) {
                write!(f, "{}", next - 1)?;
            }
        }
        Ok(())
    }
}

/// The form that [`Selection`] describes; reading it back gives an equal one.
impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Selection::default() {
            return f.write_str(DEFAULT);
        }
        if let Some(common) = &self.common {
            write!(f, "{common}")?;
        }
        for (i, (operation, table)) in self.own.iter().enumerate() {
            let separator = if i == 0 && self.common.is_none() { "" } else { "," };
            write!(f, "{separator}{operation}={table}")?;
        }
        Ok(())
    }
}

const DEFAULT: &str = "default";

impl FromStr for Selection {
    type Err = Error;

    /// # Errors
    /// [`Error::Config`] for sizes without a path or with two, names that nothing has, and algorithms that an operation
    /// does not have.
    fn from_str(text: &str) -> Result<Self, Error> {
        parse(text).map_err(|reason| Error::Config(format!("the algorithms '{text}': {reason}")))
    }
}

/// Reads a selection, or says why it is none.
pub(crate) fn parse(text: &str) -> Result<Selection, String> {
    let mut selection = Selection::default();
    if text == DEFAULT {
        return Ok(selection);
    }
    for (i, piece) in text.split(',').enumerate() {
        let Some((name, ranges)) = piece.split_once('=') else {
            if i > 0 {
                return Err(format!("'{piece}' names no operation: write operation={piece}, or put it first"));
            }
            selection.common = Some(read(piece)?);
            continue;
        };
        let operation = SELECTABLE.into_iter().find(|operation| operation.to_string() == name);
        let operation =
            operation.ok_or_else(|| format!("'{name}' is no operation: give one of {}", list(&SELECTABLE)))?;
        let table = read(ranges)?;
        for (path, _) in &table.0 {
            if let Path::Plan(algorithm) = path
                && !algorithm.serves(operation)
            {
                let own: Vec<_> = Algorithm::ALL.iter().copied().filter(|other| other.serves(operation)).collect();
                return Err(format!("{operation} has no {algorithm}: give native or one of {}", list(&own)));
            }
        }
        if selection.own.iter().any(|(other, _)| *other == operation) {
            return Err(format!("{operation} is there twice: write all its sizes in one place"));
        }
        selection.own.push((operation, table));
    }
    selection.own.sort_by_key(|(operation, _)| *operation as u8);
    Ok(selection)
}

/// Reads `path:from-to;path:from-`.
fn read(ranges: &str) -> Result<Table, String> {
    let mut entries = Vec::new();
    // What the next range must begin with; none after an open one.
    let mut next = Some(0usize);
    for range in ranges.split(';') {
        let form = || format!("'{range}' has not the form path:from-to or path:from-, such as ring:65536-");
        let (name, sizes) = range.split_once(':').ok_or_else(form)?;
        let (from, to) = sizes.split_once('-').ok_or_else(form)?;
        let paths = || Algorithm::ALL.iter().copied().map(Path::Plan).chain([Path::Native]);
        let path = paths().find(|path| path.to_string() == name);
        let path =
            path.ok_or_else(|| format!("'{name}' is no path: give one of {}", list(&paths().collect::<Vec<_>>())))?;
        let from = size(from).ok_or_else(form)?;
        match next {
            None => return Err(format!("'{range}' comes after a range without an end")),
            Some(next) if from > next => {
                return Err(format!("no path for sizes from {next} to {}: let '{range}' begin there", from - 1));
            }
            Some(next) if from < next => {
                return Err(format!("two paths for size {from}: let '{range}' begin with {next}"));
            }
            Some(_) => entries.push((path, from)),
        }
        next = match to {
            "" => None,
            to => {
                let to = size(to).ok_or_else(form)?;
                if to < from {
                    return Err(format!("'{range}' ends before it begins"));
                }
                Some(to.checked_add(1).ok_or_else(form)?)
            }
        };
    }
    match next {
        Some(next) => Err(format!("no path for sizes from {next} on: leave out the end of the last range")),
        None => Ok(Table(entries)),
    }
}

/// Digits alone: `+1` is a number for the standard library.
fn size(text: &str) -> Option<usize> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

fn list(all: &[impl ToString]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(all(test, not(bonfire_loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read_back(text: &str) {
        assert_eq!(text.parse::<Selection>().unwrap().to_string(), text);
    }

    fn path(text: &str, operation: Operation, bytes: usize, engine: bool) -> String {
        text.parse::<Selection>().unwrap().path(operation, bytes, 4, engine).to_string()
    }

    #[test]
    fn tables_are_printed_as_they_are_read() {
        read_back("default");
        read_back("direct:0-65536;ring:65537-");
        read_back("native:0-");
        read_back("all_reduce=doubling:0-16384;ring:16385-,broadcast=tree:0-");
        read_back("ring:0-,all_reduce=doubling:0-0;halving:1-1;ring:2-,barrier=native:0-,all_to_all=direct:0-");
        let sorted = "all_to_all=direct:0-,reduce=tree:0-".parse::<Selection>().unwrap().to_string();
        assert_eq!(sorted, "reduce=tree:0-,all_to_all=direct:0-");
        for algorithm in Algorithm::ALL.iter().copied() {
            assert_eq!(Selection::from(algorithm), format!("{algorithm}:0-").parse().unwrap());
        }
    }

    #[test]
    fn sizes_find_their_paths_up_to_the_last_byte() {
        use Operation::{AllReduce, AllToAll, Barrier, Broadcast};
        let text = "doubling:0-99;ring:100-,all_reduce=native:0-9;tree:10-99;direct:100-";
        for (bytes, want) in [(0, "native"), (9, "native"), (10, "tree"), (99, "tree"), (100, "direct")] {
            assert_eq!(path(text, AllReduce, bytes, true), want, "{bytes}");
        }
        assert_eq!(path(text, AllReduce, usize::MAX, true), "direct");
        // Operations without a table of their own take the nearest that they have.
        assert_eq!(path(text, Broadcast, 99, true), "halving");
        assert_eq!(path(text, Broadcast, 100, true), "ring");
        assert_eq!(path(text, AllToAll, 99, true), "direct");
        assert_eq!(path(text, Barrier, 0, true), "direct");
        // By default the engine has all; without one it is the plans.
        assert_eq!(path("broadcast=tree:0-", AllReduce, 7, true), "native");
        assert_eq!(path("broadcast=tree:0-", AllReduce, 7, false), path("default", AllReduce, 7, false));
        assert_eq!(path("native:0-", AllReduce, 7, false), path("default", AllReduce, 7, false));
    }

    #[test]
    fn what_is_in_effect_holds_at_every_size() {
        for text in ["default", "native:0-99;ring:100-", "all_reduce=ring:0-5;native:6-20000;tree:20001-"] {
            let selection = text.parse::<Selection>().unwrap();
            for (operation, world_size, engine) in
                SELECTABLE.into_iter().flat_map(|op| [(op, 2, false), (op, 4, false), (op, 4, true)])
            {
                let effect = selection.in_effect(operation, world_size, engine);
                // It needs no engine and no default any more, and says the same.
                for bytes in (0..23).map(|shift| 1usize << shift).chain([0, 5, 6, 99, 100, 20_000, 20_001]) {
                    let at = |selection: &Selection| selection.path(operation, bytes, world_size, engine);
                    assert_eq!(at(&effect), at(&selection), "{text}, {operation} at {bytes}: {effect}");
                }
                assert_eq!(effect.to_string().parse(), Ok(effect), "{text}");
            }
        }
    }

    #[test]
    fn an_engine_is_wanted_where_any_table_leaves_it_something() {
        let native = |text: &str| text.parse::<Selection>().unwrap().is_native_anywhere();
        assert!(native("default") && native("native:0-") && native("all_reduce=ring:0-"));
        assert!(native("ring:0-,broadcast=tree:0-5;native:6-"));
        assert!(!native("ring:0-") && !native("ring:0-,broadcast=tree:0-"));
        let all: Vec<_> = SELECTABLE.iter().map(|operation| format!("{operation}=direct:0-")).collect();
        assert!(!native(&all.join(",")) && native(&all[1..].join(",")));
        assert!(!native(&format!("native:0-,{}", all.join(","))));
    }

    #[test]
    fn tables_that_cannot_work_are_refused_with_the_remedy() {
        for (text, reason) in [
            ("", "form path:from-to"),
            ("ring", "form path:from-to"),
            ("ring:0", "form path:from-to"),
            ("ring:a-", "form path:from-to"),
            ("ring:+0-", "form path:from-to"),
            ("ring:-", "form path:from-to"),
            ("ring:0-18446744073709551616", "form path:from-to"),
            ("ring:0-18446744073709551615;tree:0-", "form path:from-to"),
            ("Ring:0-", "'Ring' is no path: give one of direct, ring, halving, doubling, tree, native"),
            ("ring:1-", "no path for sizes from 0 to 0"),
            ("ring:0-9;tree:11-", "no path for sizes from 10 to 10"),
            ("ring:0-9;tree:9-", "two paths for size 9: let 'tree:9-' begin with 10"),
            ("ring:0-9", "no path for sizes from 10 on"),
            ("ring:0-;tree:5-", "after a range without an end"),
            ("ring:0-9;tree:10-9;direct:10-", "ends before it begins"),
            ("ring:0-;", "form path:from-to"),
            ("ring:0-,", "names no operation"),
            ("ring:0-,tree:0-", "names no operation"),
            ("all_reduce=ring:0-,tree:0-", "names no operation"),
            ("send=direct:0-", "'send' is no operation: give one of all_reduce, reduce"),
            ("all_reduce =ring:0-", "is no operation"),
            ("broadcast=doubling:0-", "broadcast has no doubling: give native or one of direct, ring, halving, tree"),
            ("all_to_all=ring:0-", "all_to_all has no ring: give native or one of direct"),
            ("reduce=ring:0-,reduce=tree:0-", "reduce is there twice"),
        ] {
            let error = text.parse::<Selection>().unwrap_err();
            let words = matches!(&error, Error::Config(words) if words.contains(text) && words.contains(reason));
            assert!(words, "'{text}': {error}");
        }
    }

    #[test]
    fn fuzz_tables() {
        let texts = [
            "default",
            "native:0-",
            "direct:0-65536;ring:65537-",
            "all_reduce=doubling:0-16384;ring:16385-,broadcast=tree:0-",
            "ring:0-,all_reduce=doubling:0-0;halving:1-1;ring:2-,barrier=native:0-,all_to_all=direct:0-",
        ];
        bonfire_testing::fuzz::fuzz("table", texts.map(|text| text.as_bytes().to_vec()), |bytes| {
            let Ok(text) = str::from_utf8(bytes) else { return false };
            let Ok(selection) = text.parse::<Selection>() else { return false };
            assert_eq!(selection.to_string().parse(), Ok(selection.clone()));
            for piece in text.split(',').filter(|_| text != DEFAULT) {
                let sizes = piece.split(';').map(|range| range.rsplit_once(':').unwrap().1.split_once('-').unwrap());
                let end = sizes.fold("0".to_owned(), |next, (from, to)| {
                    assert_eq!(from.parse(), next.parse::<u128>(), "a gap or an overlap in {text}");
                    to.parse::<u128>().map_or(String::new(), |to| (to + 1).to_string())
                });
                assert_eq!(end, "", "{text} says nothing of large sizes");
            }
            for operation in SELECTABLE {
                let effect = selection.in_effect(operation, 4, true);
                assert_eq!(effect.to_string().parse(), Ok(effect));
            }
            true
        });
    }

    proptest! {
        #[test]
        fn no_text_makes_a_table_that_does_not_come_back(text in "[a-z_=:;,0-9-]{0,40}") {
            if let Ok(selection) = text.parse::<Selection>() {
                prop_assert_eq!(selection.to_string().parse(), Ok(selection));
            }
        }
    }
}
